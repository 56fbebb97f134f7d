"""The trainer: a step's services and parts turn trajectories into new weights.

Code here runs on all trainer ranks. Only rank 0 writes to the buffer or calls an engine.
"""

FACE = ("inference.inference", "replay", "tracking", "trainer")
"""Modules that other packages may import."""
