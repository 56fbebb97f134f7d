"""The rollout engine: vLLM's own server in its own processes, its client, and the controls that a trainer uses."""
