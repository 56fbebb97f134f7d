"""The process of an engine."""
