"""Rows of tasks and preferences: read and checked, generated, and turned into token ids."""

from megarl.tasksets.entries import Entry, Generator
from megarl.tasksets.files import place_of, read_recipe
from megarl.tasksets.generate import GENERATORS, Kind, generate, recipe
from megarl.tasksets.images import chat_messages
from megarl.tasksets.preferences import read_preferences, write_preferences
from megarl.tasksets.rows import read_rows, write_rows
from megarl.tasksets.tokenizer import (
    ChatTokenizer,
    check_prompts,
    encode_demonstrations,
    encode_preferences,
    encode_rows,
)

__all__ = [
    "GENERATORS",
    "ChatTokenizer",
    "Entry",
    "Generator",
    "Kind",
    "chat_messages",
    "check_prompts",
    "encode_demonstrations",
    "encode_preferences",
    "encode_rows",
    "generate",
    "place_of",
    "read_preferences",
    "read_recipe",
    "read_rows",
    "recipe",
    "write_preferences",
    "write_rows",
]
