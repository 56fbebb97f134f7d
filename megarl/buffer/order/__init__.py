"""Tasks and rows of a step."""
