"""``megarl data``: a run's groups and trajectories, looked at, exported and pruned; explained verdicts."""
