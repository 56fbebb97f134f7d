"""The buffer that explorer and trainer share: its rows, their order, and operators on groups."""
