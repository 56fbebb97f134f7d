"""Checks of engine settings."""
