"""The directory of a run: its owner, its content, its repair."""
