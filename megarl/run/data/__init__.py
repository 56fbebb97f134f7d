"""``megarl data``: shows, exports and prunes a run's groups and trajectories; explains verdicts."""
