"""Moves of a rank's models from the device and back between the phases of a step; memory that grows or is
full."""
