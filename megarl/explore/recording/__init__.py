"""The rollout model as a workflow sees it: it samples, and records the turns of a trajectory."""
