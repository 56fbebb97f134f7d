"""Requests and controls of an engine, for explorer, trainer and supervisor; no torch."""
