"""Tools that a model calls in the middle of a trajectory."""

from megarl.explore.tools.formats import FORMATS, ToolCall, ToolFormat, format_of

__all__ = ["FORMATS", "ToolCall", "ToolFormat", "format_of"]
