"""The loop: the only place where the stages meet."""
