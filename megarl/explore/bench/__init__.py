"""Measurement of one model on held-out tasks: the driver process, and counts of the answers."""
