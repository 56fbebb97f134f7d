"""The trainer: a step's services and parts make new weights out of trajectories.

Code here runs on every trainer rank at once. Only rank 0 writes to the buffer or calls an engine.
"""

FACE = ("tracking", "trainer")
"""Modules that other packages may import."""
