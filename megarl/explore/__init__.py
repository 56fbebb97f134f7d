"""Tasks become scored trajectories in the store. Never imports torch, nor ``learn``."""
