"""Advantages and optimizer updates of a step, and the rejection of non-finite updates."""
