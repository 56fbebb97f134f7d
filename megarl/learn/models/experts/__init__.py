"""Routers of experts, and the replay of an engine's choices."""
