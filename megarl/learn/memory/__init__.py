"""Bytes of a job's models, and where they lie in each phase of a step."""
