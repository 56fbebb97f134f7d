"""Faults by what they break; each file has a table ``FAULTS``."""
