"""Reward of ``benchmarks/workflows.py``: 1 for the number alone."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Compare the last response with the number."""
    return float(solution_str.strip() == ground_truth)
