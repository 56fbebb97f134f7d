"""The explorer: workflows, agents and environments turn tasks into trajectories.

Code here imports nothing of ``weights``, ``learn`` and ``train``, and no torch. It reads and writes the buffer.
"""

FACE = (
    "bench.answers",
    "bench.driver",
    "environments",
    "explorer.explorer",
    "explorer.explorer_share",
    "recording.images",
    "workflows",
)
"""Modules that other packages may import."""
