"""Comparison of trainer and engine: one sequence through both, layer by layer and operation by operation.

Code here starts one engine and one trainer's model. It changes nothing of a run.
"""

FACE = ("command",)
"""Modules that other packages may import."""
