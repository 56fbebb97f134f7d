"""Workflows: what happens in a trajectory, from a task to its last turn."""

from megarl.explore.workflows.single_turn import single_turn
from megarl.explore.workflows.types import RolloutModel, Workflow

WORKFLOWS: dict[str, Workflow] = {"single_turn": single_turn}
"""By the names of ``rollout.workflow``."""

__all__ = ["WORKFLOWS", "RolloutModel", "Workflow"]
