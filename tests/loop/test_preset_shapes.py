"""The grids and turns of the one-node experiments for real models, with toy models on CPU: eight ranks and eight
engines that take turns, three steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import Config, compose
from tests.system.jobs import START_S, TINY, Job
from tests.unit.test_configs import TURNS

pytestmark = [pytest.mark.timeout(6 * START_S), pytest.mark.soak]
CONFIGS = {name: compose([f"experiment={name}"]) for name in TURNS}


def shape(config: Config) -> tuple[str, ...]:
    """Settings of a preset that a toy job can have as they are."""
    grid, rollout = config.parallel, config.rollout
    offloads = {"trainer": config.trainer.offload, "reference": config.reference.offload}
    return (
        f"algorithm={config.algorithm.name}",
        f"parallel.tp={grid.tp}",
        f"parallel.dp={grid.dp}",
        f"parallel.sequence_parallel={str(grid.sequence_parallel).lower()}",
        f"rollout.replicas={rollout.replicas}",
        f"rollout.tp={rollout.tp}",
        f"rollout.placement={rollout.placement}",
        f"rollout.offload={rollout.offload}",
        f"model.recompute={config.model.recompute}",
        *(f"{role}.offload={place}" for role, place in offloads.items()),
        *(["critic.offload=memory"] if config.algorithm.name == "ppo" else []),
    )


@pytest.mark.parametrize(
    "settings", sorted({shape(config) for config in CONFIGS.values()}), ids=lambda settings: settings[0]
)
def test_three_steps(settings: tuple[str, ...], tmp_path: Path) -> None:
    job = Job(tmp_path / "run", (*TINY, "trainer.steps=3", "model.from_scratch.num_key_value_heads=4", *settings))
    try:
        assert job.start().wait(4 * START_S) == 0, job.output.read_text()[-2000:]
    finally:
        job.clean_up()
    assert job.steps() == [1, 2, 3]
