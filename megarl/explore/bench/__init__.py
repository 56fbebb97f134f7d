"""Measurement of one model on the held-out tasks: the process that asks for the answers, and what it counts in them."""
