"""The report of a job without rollouts: losses and preferences in the place of answers, at every stage of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.config import save_resolved
from megarl.run.report.data import load
from megarl.run.report.html import summary, write_report
from tests.unit.test_report import Page, make_config


def make_run(folder: Path, *, preferences: bool, evaluations: int) -> None:
    """10 steps; evaluations before and after 5 and 10 of them, as far as there are so many."""
    folder.mkdir()
    config = make_config(folder, steps=10)
    save_resolved(config, folder / "resolved.json")
    store = Store(config.store.url)
    for i, name in enumerate(["eval-before", "eval-5", "eval-after"][:evaluations]):
        data = {"rollout_id": name, "step": 5 * i, "rows": 70, "loss": 0.7 - 0.1 * i}
        store.journal.record_event("trainer", "evaluation", data | ({"accuracy": 0.5 + 0.2 * i} if preferences else {}))
    for step in range(1, 1 + 5 * max(0, evaluations - 1)):
        more = {"rewards/accuracies": 0.6, "rewards/margins": 0.1} if preferences else {}
        store.journal.record_step(step, {"actor/loss": 0.7 - 0.01 * step, "actor/grad_norm": 1.0, **more})
    store.close()


@pytest.mark.parametrize("preferences", [True, False])
@pytest.mark.parametrize("evaluations", range(4))
def test_every_stage_of_a_run(tmp_path: Path, preferences: bool, evaluations: int) -> None:
    folder = tmp_path / "tiny"
    make_run(folder, preferences=preferences, evaluations=evaluations)
    page = Page(write_report(folder).read_text())
    words, said = " ".join(page.words), summary(folder)
    assert (
        (folder / "report" / ("loss_curve.png" if evaluations else "reward_curve.png"))
        .read_bytes()
        .startswith(b"\x89PNG")
    )
    run = load(folder)
    assert run.losses == tuple((5 * i, pytest.approx(0.7 - 0.1 * i)) for i in range(evaluations))
    assert not run.finished, "its HF checkpoint is not there"
    if evaluations == 0:
        return
    assert run.held_out == 70 and "70 held-out rows" in said
    after = evaluations == 3
    if preferences:
        assert ("Held-out preferences 50.0% → 90.0%" if after else "Held-out preferences 50.0%") in words
        assert ("90.0%" in said) == after and "50.0%" in said
    else:
        assert ("Held-out loss 0.7 → 0.5" if after else "Held-out loss 0.7") in words
        assert "Chosen answer preferred" not in words and "%" not in said.split("held-out rows")[1]
    assert "Sample answers" not in words and "reward" not in said.split("HF checkpoint")[0]
    assert "loss curve" in words and "reward curve" not in words


def test_it_is_finished_with_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    make_run(folder, preferences=False, evaluations=3)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    assert load(folder).finished and "finished: 10 steps" in summary(folder)
