"""Weights as they arrive in an engine, and the link that they come over."""
