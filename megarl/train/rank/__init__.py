"""A trainer rank: its place, its state, agreement with other ranks, reports."""
