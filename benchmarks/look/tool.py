"""Tool of ``benchmarks/workflows.py``: what lies in the drawers of a room, which no prompt says."""

from megarl.core.schema import Task


def look(drawer: int, task: Task) -> int:
    """Return the number in a drawer, 0 to 9."""
    if not 0 <= drawer <= 9:
        raise ValueError("drawers are 0 to 9")
    return int(task.extra_info["drawers"][drawer])
