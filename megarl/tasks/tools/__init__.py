"""Tools that a model calls during a trajectory."""

from megarl.tasks.tools.call_formats import ToolCall
from megarl.tasks.tools.formats import FORMATS, ToolFormat, format_of, written_by

__all__ = ["FORMATS", "ToolCall", "ToolFormat", "format_of", "written_by"]
