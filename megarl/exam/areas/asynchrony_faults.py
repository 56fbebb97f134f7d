"""Faults of rollouts ahead: versions, staleness, importance weights, and which groups a step trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace as change
from typing import Any

from megarl.exam.areas.engine_faults import GOING_ON
from megarl.exam.fault import Fault, wrap


def _version_ahead() -> None:
    from megarl.buffer.store.journal import PacingTable
    from megarl.core.schema import WeightsVersion

    def around(original: Any, table: Any, versions: Any) -> Any:
        later = {version: WeightsVersion(version.attempt, version.n + 1) for version in versions}
        found = original(table, [*versions, *later.values()])
        return {version: found.get(later[version], found[version]) for version in versions}

    wrap(PacingTable.version_steps, around)


def _of_lags(lag: Callable[[int], int]) -> None:
    """Change the lag of every version in the trainer."""
    from megarl.train.rollout.rollouts import Rollouts

    def around(original: Any, rollouts: Any, *args: Any) -> Any:
        return {version: lag(found) for version, found in original(rollouts, *args).items()}

    wrap(Rollouts._lags, around)


def _lag_zero() -> None:
    _of_lags(lambda lag: 0)


def _lag_in_publications() -> None:
    _of_lags(lambda lag: lag // 2)


def _stale_not_dropped() -> None:
    from megarl.buffer.order.pacing import Pacing

    wrap(Pacing.deadline, lambda original, pacing, published: original(pacing, published) + 2)


def _slow_groups_dropped() -> None:
    from megarl.explore.explorer.trajectories import TrajectoryRunner

    async def ignored() -> None:
        return None

    async def around(original: Any, runner: Any, group: Any, index: int, gatherer: Any, generated: Any) -> Any:
        found, seed = await original(runner, group, index, gatherer, generated), group.seed
        for retry in range(1, 4):
            if found.response_length > 3 and seed is not None:
                found = await original(runner, change(group, seed=seed + 7919 * retry), index, gatherer, ignored)
        return found

    wrap(TrajectoryRunner.run, around)


def _first_enders() -> None:
    from megarl.buffer.store import claims

    wrap(claims.samples_of, lambda original, group_size, sampling: original(group_size, sampling) + group_size)


def _mixed_versions_unmarked() -> None:
    from megarl.core.schema import WeightsSpan
    from megarl.exam.areas.engine_faults import slow_down
    from megarl.explore.recording import model

    slow_down()

    def around(original: Any, *args: Any) -> Any:
        turn = original(*args)
        return change(turn, spans=(WeightsSpan(0, len(turn.token_ids), turn.spans[-1].version),))

    wrap(model._model_turn, around)


def _unfinished_kept() -> None:
    from megarl.explore.explorer.segments import SegmentSampler

    numbers = itertools.count(1)

    async def around(original: Any, sampler: Any, request: Any) -> Any:
        if next(numbers) % 3:
            return await original(sampler, request)
        found = await original(sampler, change(request, max_tokens=1))
        return change(found, finish_reason="stop")

    wrap(SegmentSampler.sample, around)


def _correction_dropped() -> None:
    from megarl.learn.algorithms.terms import surrogate

    def around(original: Any, *args: Any) -> Any:
        weight, metrics = original(*args)
        return None if weight is None else weight * 0.0 + 1.0, metrics

    wrap(surrogate.correction, around)


def _correction_of_current() -> None:
    from megarl.learn.algorithms.terms import surrogate

    wrap(
        surrogate.correction,
        lambda original, batch, config: original(change(batch, old_logp=batch.logp.detach()), config),
    )


def _ratio_one() -> None:
    from megarl.learn.training import objectives

    def around(original: Any, *args: Any, **more: Any) -> Any:
        return original(*args, **{**more, "unchanged": True})

    wrap(objectives.policy, around)


def _groups_again() -> None:
    from megarl.train.rollout.reading import RolloutReader

    kept: list[Any] = []

    def around(original: Any, reader: Any, choose: Any) -> Any:
        kept.append(original(reader, choose))
        return kept[max(0, len(kept) - 2)]

    wrap(RolloutReader.take, around)


def _partial_batch() -> None:
    from megarl.train.rollout.reading import RolloutReader

    def around(original: Any, reader: Any, choose: Any) -> Any:
        found = original(reader, choose)
        groups = list(dict.fromkeys(e.group_id for e in found or ()))
        return found and [e for e in found if e.group_id not in groups[-2:]]

    wrap(RolloutReader.take, around)


def _of_baseline(key: Callable[[Any], Any]) -> None:
    """Compute the statistics of a group over the responses with equal keys."""
    from megarl.buffer.experience import pipeline
    from megarl.buffer.experience.operators import group_stats

    def around(original: Any, trajectories: Any) -> Any:
        scores: dict[Any, list[float]] = {}
        for e in trajectories:
            scores.setdefault(key(e), []).append(e.reward.score)
        return [change(e, group_stats=group_stats(scores[key(e)])) for e in trajectories]

    wrap(pipeline.with_group_stats, around)


def _groups_merged() -> None:
    from megarl.exam.areas.data_faults import of_rows

    of_rows("train", lambda rows: rows[:4] * (len(rows) // 4))
    _of_baseline(lambda e: int(e.task_id.rpartition("/")[2]) % 4)


def _groups_of_one() -> None:
    _of_baseline(lambda e: (e.group_id, e.index))


LONG = ("sync.order=admission", "model.path={folder}/long", "trainer.tasks_per_step=32")
"""Responses of many lengths, of all groups."""
FAULTS: tuple[Fault, ...] = (
    Fault(
        "version-ahead",
        "PrimeIntellect-ai/prime-rl#3050",
        "Tokens are labelled with weights that the engine gets only later.",
        alarm="lag",
        job="late",
        install=_version_ahead,
        begins=2,
    ),
    Fault(
        "lag-zero",
        "verl-project/uni-agent#103",
        "Versions of the tokens never reach the trainer, so every lag is constant.",
        alarm="lag",
        job="late",
        install=_lag_zero,
        within=2,
        begins=2,
    ),
    Fault(
        "lag-in-publications",
        "Tencent-Hunyuan/UniRL#310",
        "The lag counts publications instead of training steps.",
        alarm="lag",
        job="late",
        install=_lag_in_publications,
        settings=("sync.interval=2",),
        within=3,
        begins=2,
    ),
    Fault(
        "stale-not-dropped",
        "allenai/open-instruct#1738",
        "Groups beyond the bound of staleness are trained.",
        alarm="stale",
        job="late",
        install=_stale_not_dropped,
        within=3,
        begins=3,
    ),
    Fault(
        "slow-groups-dropped",
        "thinking-machines-lab/tinker-cookbook#822",
        "Responses that take long are discarded and sampled again, so trained responses are shorter than sampled ones.",
        alarm="length-bias",
        job="late",
        install=_slow_groups_dropped,
        settings=LONG,
    ),
    Fault(
        "first-enders",
        "areal-project/AReaL#246",
        "The responses that end first are trained, which favours short ones.",
        alarm="length-bias",
        job="tiny",
        install=_first_enders,
        settings=LONG,
    ),
    Fault(
        "mixed-versions-unmarked",
        "THUDM/slime#2092",
        "A response that goes on after a weight update is marked as sampled by one version.",
        alarm="lag",
        job="late",
        install=_mixed_versions_unmarked,
        settings=GOING_ON,
        within=2,
        begins=2,
    ),
    Fault(
        "unfinished-kept",
        "radixark/miles#2589",
        "A response that a weight update aborts is kept as a finished one.",
        alarm="no-end",
        job="late",
        install=_unfinished_kept,
    ),
    Fault(
        "correction-dropped",
        "radixark/miles#1829",
        "Stale tokens are trained without the importance weights that the settings ask for.",
        alarm="loss",
        job="late",
        install=_correction_dropped,
        within=2,
        begins=2,
    ),
    Fault(
        "correction-of-current",
        "THUDM/slime#179",
        "Importance weights are computed from the log-probs of the pass in training instead of the old ones.",
        alarm="loss",
        job="late",
        install=_correction_of_current,
        within=2,
        begins=2,
    ),
    Fault(
        "ratio-one",
        "NovaSky-AI/SkyRL#1315",
        "The old log-probs are those of the same pass, so the ratio is 1 and nothing is clipped.",
        alarm="loss",
        job="late",
        install=_ratio_one,
        settings=("trainer.tasks_per_step=16",),  # of four groups of an update all may have advantage 0
    ),
    Fault(
        "groups-again",
        "PrimeIntellect-ai/prime-rl#491",
        "The trainer is ahead of the explorer and trains on the last step's groups again.",
        alarm="twice",
        job="tiny",
        install=_groups_again,
        within=2,
        begins=2,
    ),
    Fault(
        "partial-batch",
        "verl-project/verl#6437",
        "Groups whose rollout failed are missing, and the step trains on the rest.",
        alarm="missing-groups",
        job="reward",
        install=_partial_batch,
    ),
    Fault(
        "groups-merged",
        "NVIDIA-NeMo/RL#3882",
        "Groups with equal prompts are merged into one.",
        alarm="advantages",
        job="reward",
        install=_groups_merged,
    ),
    Fault(
        "groups-of-one",
        "PeterGriffinJin/Search-R1#39",
        "Every response has a group id of its own, so no response is compared with another.",
        alarm="advantages",
        job="reward",
        install=_groups_of_one,
    ),
)
