"""Gaps of vLLM on CPU, filled before a worker builds its model."""
