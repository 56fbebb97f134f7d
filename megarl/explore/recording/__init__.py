"""The rollout model for workflows: it samples, and records the turns of a trajectory."""
