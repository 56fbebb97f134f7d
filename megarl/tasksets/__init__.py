"""Task rows: read and checked, generated, and turned into token ids."""

from megarl.tasksets.generate import GENERATORS, generate, recipe
from megarl.tasksets.parquet import read_recipe, read_rows, write_rows
from megarl.tasksets.tokenizer import ChatTokenizer, check_prompts, encode_rows

__all__ = ["GENERATORS", "ChatTokenizer", "check_prompts", "encode_rows", "generate", "read_recipe", "read_rows", "recipe", "write_rows"]
