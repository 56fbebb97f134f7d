"""``megarl data``: a run's groups and trajectories, looked at, exported and pruned. ``explain.py``: verdicts on rows of a file."""
