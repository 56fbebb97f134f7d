"""A job with buffer.replay trains on groups of earlier steps, those that its settings ask for; killed and resumed, it
has the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.buffer.order.draws import REPLAY
from megarl.buffer.store import Store
from megarl.core.schema import Trajectory, WeightsVersion
from tests.loop.same_run import steps_of, whole_and_killed
from tests.system.jobs import START_S, TINY, Job

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS, TASKS, USES, DECAY, MAX_AGE, SEED = 5, 8, 3, 0.5, 3, 7
SETTINGS = (
    *TINY,
    f"trainer.steps={STEPS}",
    f"trainer.seed={SEED}",
    "trainer.eval_interval=0",
    "algorithm.correction=truncate",
    "buffer.replay.share=0.5",
    f"buffer.replay.uses={USES}",
    f"buffer.replay.decay={DECAY}",
    f"buffer.replay.max_age={MAX_AGE}",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job that was left alone, and one that was killed in its fourth step and resumed after its second."""

    def undone(killed: Job) -> None:
        assert killed.query("select count(*) from replays where step = 3") == [(TASKS // 2,)], "nothing is undone"

    with whole_and_killed(tmp_path_factory.mktemp("replay"), SETTINGS, 3, 2, undone) as runs:
        yield runs


def trained(run_dir: Path) -> list[tuple[dict[str, list[Trajectory]], dict[str, list[Trajectory]]]]:
    """Groups of each step as the store has them: first used by it, and replayed."""
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    found = []
    for number in range(1, STEPS + 1):
        first = [group.group_id for group in store.replays.consumed(number - 1, number)]
        kinds = (first, list(store.replays.counts(number - 1, number)))
        found.append(tuple({group_id: store.groups.read([group_id]) for group_id in ids} for ids in kinds))
    store.close()
    return found  # type: ignore[return-value]


def test_metrics_and_rows_are_what_was_asked_for(runs: tuple[Path, Path]) -> None:
    steps = trained(runs[0])
    born: dict[str, int] = {}
    uses: Counter[str] = Counter()
    for number, (record, (first, replayed)) in enumerate(zip(steps_of(runs[0]), steps, strict=True), 1):
        assert len(replayed) == (TASKS // 2 if number > 1 else 0) and len(first) + len(replayed) == TASKS
        born |= dict.fromkeys(first, number)
        uses.update([*first, *replayed])
        ages = [number - born[group] for group in replayed]
        assert record["replay/share"] == len(replayed) / TASKS and all(0 < age <= MAX_AGE for age in ages)
        everything = [e for group in (first | replayed).values() for e in group]
        assert record["perf/total_num_tokens"] == sum(sum(map(len, e.turns)) for e in everything)
        assert record["critic/score/mean"] == pytest.approx(np.mean([e.reward.score for e in everything]))
        old = sum(len(e.response) for group in replayed.values() for e in group)
        assert record["rollout/stale_tokens"] == pytest.approx(old / sum(len(e.response) for e in everything))
        if replayed:
            assert (record["replay/age/mean"], record["replay/age/max"]) == (np.mean(ages), max(ages))
            counts = [uses[group] for group in replayed]
            assert (record["replay/uses/mean"], record["replay/uses/max"]) == (np.mean(counts), max(counts))
    assert max(uses.values()) <= USES and max(number - born[g] for number, s in enumerate(steps, 1) for g in s[1]) > 1


def test_draws_follow_the_decay(runs: tuple[Path, Path]) -> None:
    """Computed here once more, with priorities that are no logarithms."""
    steps, uses = trained(runs[0]), Counter[str]()
    for number, (first, replayed) in enumerate(steps, 1):
        candidates = sorted((group, by) for by, s in enumerate(steps[: number - 1], 1) for group in s[0])
        candidates = [(group, by) for group, by in candidates if number - by <= MAX_AGE]
        arrivals = np.random.default_rng([SEED, number - 1, REPLAY]).standard_exponential(len(candidates))
        ranked = sorted(
            (arrival / DECAY ** (number - by), group)
            for arrival, (group, by) in zip(arrivals, candidates, strict=True)
            if uses[group] < USES
        )
        assert {group for _, group in ranked[: TASKS // 2]} == set(replayed)
        uses.update([*first, *replayed])


def test_replayed_tokens_keep_the_weights_and_log_probs_of_their_step(runs: tuple[Path, Path]) -> None:
    versions = []
    for first, replayed in trained(runs[0]):
        own = {span.version for group in first.values() for e in group for span in e.response.spans}
        assert len(own) == 1
        versions += own
        old = {span.version for group in replayed.values() for e in group for span in e.response.spans}
        assert old <= set(versions[:-1]) and (old or len(versions) == 1)
    assert versions == sorted(versions) and isinstance(versions[0], WeightsVersion)
    differences = [record["training/rollout_logp_diff_max"] for record in steps_of(runs[0])]
    assert differences[0] < 1e-3 < min(differences[1:])
    weights = [record["rollout_corr/weight_mean"] for record in steps_of(runs[0])]
    assert abs(weights[0] - 1) < 1e-5 < min(abs(weight - 1) for weight in weights[1:])


def test_a_killed_job_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    whole, killed = (load_file(run / "hf" / "model.safetensors") for run in runs)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    a, b = ([(list(first), sorted(again)) for first, again in trained(run)] for run in runs)
    assert a == b
    for name in ("actor/pg_loss", "critic/score/mean", "replay/share", "rollout_corr/weight_mean"):
        first, second = ([record[name] for record in steps_of(run)] for run in runs)
        assert first == second
