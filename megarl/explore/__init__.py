"""The explorer: workflows, agents and environments turn tasks into trajectories.

Code here imports nothing of ``weights``, ``learn`` and ``train``, and no torch. It reads and writes the buffer.
"""

FACE = ("bench", "environments", "explorer.explorer", "explorer.other_explorers", "recording.images", "workflows")
"""Modules that other packages may import."""
