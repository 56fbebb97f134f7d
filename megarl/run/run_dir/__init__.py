"""The directory of a run: its owner, its contents, its repair."""
