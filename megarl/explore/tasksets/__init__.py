"""Rows of tasks and preferences: read and checked, generated, and turned into token ids."""

from megarl.explore.tasksets.bad_rows import Faults, record, recorded
from megarl.explore.tasksets.columns import Kind
from megarl.explore.tasksets.entries import Entry, Generator
from megarl.explore.tasksets.files import place_of, read_recipe
from megarl.explore.tasksets.generate import GENERATORS, generate, recipe
from megarl.explore.tasksets.images import chat_messages
from megarl.explore.tasksets.preferences import read_preferences, write_preferences
from megarl.explore.tasksets.process import difficulty_of, processed, with_templates
from megarl.explore.tasksets.rows import read_rows, write_rows
from megarl.explore.tasksets.sources import place_of_row, read_tasks, single_file, source_of, sources_of
from megarl.explore.tasksets.tokenizer import (
    ChatTokenizer,
    Place,
    check_prompts,
    encode_demonstrations,
    encode_preferences,
    encode_rows,
    text_of_tokens,
)

__all__ = [
    "GENERATORS",
    "ChatTokenizer",
    "Entry",
    "Faults",
    "Generator",
    "Kind",
    "Place",
    "chat_messages",
    "check_prompts",
    "difficulty_of",
    "encode_demonstrations",
    "encode_preferences",
    "encode_rows",
    "generate",
    "place_of",
    "place_of_row",
    "processed",
    "read_preferences",
    "read_recipe",
    "read_rows",
    "read_tasks",
    "recipe",
    "record",
    "recorded",
    "single_file",
    "source_of",
    "sources_of",
    "text_of_tokens",
    "with_templates",
    "write_preferences",
    "write_rows",
]
