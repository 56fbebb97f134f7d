"""PPO with critic, reference and reward model on TP2xPP2 computes the same bits wherever its models' memory waits, and
however its engine leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.loop.same_run import learned
from tests.loop.test_roles import ROLES, score_model
from tests.system.jobs import START_S, TINY, Job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * START_S)]
PLACES = list(product(("memory", "disk"), repeat=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    score_model(folder / "scores")
    return folder


def finished(folder: Path, name: str, *more: str) -> dict[str, object]:
    """Metrics and weights of a job of two steps."""
    scores = folder / "scores"
    models = ["algorithm=ppo", f"reward_model.path={scores}", f"critic.path={scores}", "reference.refresh=2"]
    settings = [*TINY, *models, "parallel=tp2pp2", "trainer.steps=2", "trainer.checkpoint_interval=1", *more]
    job = Job(folder / name, settings).start()
    try:
        assert job.wait(2 * START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    return learned(folder / name)


@pytest.fixture(scope="module")
def stays(folder: Path) -> Iterator[dict[str, object]]:
    yield finished(folder, "stays")


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_the_same_bits(folder: Path, stays: dict[str, object], number: int) -> None:
    away = [f"{role}.offload={place}" for role, place in zip(ROLES[:4], PLACES[number], strict=True)]
    engines = ["rollout.placement=colocated", f"rollout.offload={('sleep', 'destroy')[number % 2]}"]
    assert finished(folder, f"away_{number}", *away, *engines) == stays
