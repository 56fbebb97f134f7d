"""Advantages and optimizer updates of a step, and the refusal of an update that is not finite."""
