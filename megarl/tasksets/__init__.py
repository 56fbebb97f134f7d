"""Task rows: read and checked, generated, and turned into token ids."""

from megarl.tasksets.generate import GENERATORS, generate
from megarl.tasksets.parquet import read_rows, write_rows
from megarl.tasksets.tokenizer import ChatTokenizer, check_prompts

__all__ = ["GENERATORS", "ChatTokenizer", "check_prompts", "generate", "read_rows", "write_rows"]
