"""The trainer: trajectories become steps."""
