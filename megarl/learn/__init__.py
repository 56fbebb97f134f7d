"""Losses, batches, grids, models and their training. Never imports vLLM, nor ``explore``."""
