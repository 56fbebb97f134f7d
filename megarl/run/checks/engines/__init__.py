"""Checks of settings of engines."""
