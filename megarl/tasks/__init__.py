"""Tasks: rows and their sources, images, tools, chat templates, tokenizers and generators.

Code here reads files of users and turns them into token ids. It imports no torch except for processors of images.
"""

from megarl.tasks.generators.entries import Entry, Generator
from megarl.tasks.generators.generate import GENERATORS, generate, recipe
from megarl.tasks.image_rows import chat_messages
from megarl.tasks.processing import (
    difficulty_of,
    place_of_row,
    processed,
    read_tasks,
    single_file,
    source_of,
    sources_of,
    with_templates,
)
from megarl.tasks.row_files import Faults, place_of, read_recipe, record, recorded
from megarl.tasks.rows import Kind, read_preferences, read_rows, write_preferences, write_rows
from megarl.tasks.templates.tokenizer import (
    ChatTokenizer,
    Place,
    check_prompts,
    encode_demonstrations,
    encode_preferences,
    encode_rows,
    text_of_tokens,
    tokenizer_digest,
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
    "tokenizer_digest",
    "with_templates",
    "write_preferences",
    "write_rows",
]

FACE = (
    "harbor",
    "image_processor",
    "image_rows",
    "processing",
    "row_files",
    "rows",
    "teacher_scores",
    "templates.template",
    "templates.tokenizer",
    "templates.turns",
    "tools",
    "tools.functions",
    "tools.python_session",
)
"""Modules that other packages may import."""
