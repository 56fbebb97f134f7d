"""Checks before any process is launched."""
