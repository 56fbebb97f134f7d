"""Layouts of weights: which element lies where, and how it gets elsewhere."""
