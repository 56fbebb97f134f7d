"""Tasks, rollouts, rewards and the store. Never imports torch, nor ``learn``."""
