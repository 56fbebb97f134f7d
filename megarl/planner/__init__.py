"""Cost model of a job: seconds and bytes of each phase of a step on a number of accelerators, from data sheets.

Code here calculates: it reads no files, starts nothing and imports no vLLM. Constants that arithmetic does not give are
in ``model_cost.py``, with their ranges.
"""

FACE = ("model_cost", "phase_seconds", "predict", "search")
"""Modules that other packages may import."""
