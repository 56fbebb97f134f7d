"""The groups of answers that a step trains with: asked for, awaited, read, verified and chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.core.errors import NonRetryableError
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.explore.experience import (
    Report,
    by_group,
    part_metrics,
    shuffle_rewards,
    split_by_accuracy,
    verifier_metrics,
    verify,
)
from megarl.explore.store import Store
from megarl.learn.algorithms import Algorithm
from megarl.run.loop.context import RunContext
from megarl.run.loop.data import EXTRA, data_seed, drawn_seed, extra_tasks, tasks_of_step
from megarl.run.loop.reading import RolloutReader
from megarl.run.loop.reporter import Reporter
from megarl.run.loop.state import TrainState

Wait = Callable[[str, str], bool]
"""(rollout id, label) -> False when the job is asked to stop (``RolloutWaiter.wait``)."""


@dataclass(frozen=True)
class StepGroups:
    """Groups that a step trains with, the same on every rank."""

    trajectories: list[Trajectory]
    """Whole groups; their statistics come with the reward model's scores."""
    rollout_ids: tuple[str, ...]
    """All that the step asked for. A step belongs to its checkpoint with all of them: they carry its number in the
    store."""
    report: Report
    """Counts of the groups of all these rollouts, dynamic sampling aside."""
    metrics: dict[str, float]


class Rollouts:
    """Training groups of a step. Every rank makes the same calls; rank 0 writes the requests."""

    def __init__(
        self,
        context: RunContext,
        algorithm: Algorithm,
        store: Store,
        reporter: Reporter,
        reader: RolloutReader,
        wait: Wait,
    ) -> None:
        self._context = context
        self._algorithm = algorithm
        self._store = store
        self._reporter = reporter
        self._reader = reader
        self._wait = wait
        self._tasks = store.task_ids("train")

    def groups(self, state: TrainState, version: WeightsVersion, vocab_size: int) -> StepGroups | None:
        """Ask for this step's groups, wait, and verify them; None when the job is asked to stop.

        With ``algorithm.dynamic_sampling`` groups that are all right or all wrong are left out, and further rollouts of
        other tasks are asked for, at most ``algorithm.max_extra_rollouts``, until there are ``trainer.tasks_per_step``
        groups; of more, the first ones count.

        Args:
            version: The weights to sample with, published last.

        Raises:
            NonRetryableError: dynamic sampling left no group at all.
        """
        config, step, timeline = self._context.config, state.step, self._reporter.timeline
        dynamic, wanted = config.algorithm.dynamic_sampling, config.trainer.tasks_per_step
        groups: list[list[Trajectory]] = []
        ids: list[str] = []
        measured: list[dict[str, float]] = []
        raw: list[Trajectory] = []
        report = Report(0, {}, {}, ())
        for extra in range(1 + config.algorithm.max_extra_rollouts if dynamic else 1):
            with timeline.phase("rollout", step=step):
                ids.append(self._request(state, version, extra))
                label = f"rollout {step + 1}" + (f", again ({len(groups)} of {wanted} groups)" if extra else "")
                if not self._wait(ids[-1], label):
                    return None
            with timeline.phase("batch", step=step):
                answers = self._reader.trajectories(ids[-1])
                if answers is None:
                    return None
                raw += answers
                verified = verify(
                    answers,
                    config.reward,
                    vocab_size=vocab_size,
                    max_response_tokens=config.rollout.max_response_tokens,
                    greedy="greedy" in self._algorithm.needs,
                    step=step,
                )
                report += verified.report
                found = by_group(verified.trajectories)
                if dynamic:
                    found, left_out = split_by_accuracy(found)
                    measured.append({name: float(count) for name, count in left_out.items()})
                groups += found
            measured.append(self._reader.metrics(ids[-1]))
            if len(groups) >= wanted:
                break
        trajectories = [trajectory for group in groups[:wanted] for trajectory in group]
        metrics = {f"rollout/{name}": sum(m.get(name, 0.0) for m in measured) for m in measured for name in m}
        metrics |= {"rollout/extra": len(ids) - 1.0, "rollout/kept_groups": float(min(len(groups), wanted))}
        if dynamic and not groups and report.kept:
            raise NonRetryableError(
                f"algorithm.dynamic_sampling=true: none of the {report.kept} groups of {len(ids)} rollouts of step "
                f"{step + 1} is "
                f"between all right ({metrics['rollout/all_right']:.0f}) and all wrong "
                f"({metrics['rollout/all_wrong']:.0f}); raise "
                "algorithm.max_extra_rollouts or algorithm.group_size, take other tasks, or set it to false"
            )
        metrics |= part_metrics(trajectories) | verifier_metrics(raw)
        if config.reward.shuffle:
            trajectories = shuffle_rewards(trajectories, seed=data_seed(config.trainer.seed, state) * 1_000_003 + step)
        return StepGroups(trajectories, tuple(ids), report, metrics)

    def _request(self, state: TrainState, version: WeightsVersion, extra: int) -> str:
        """Ask for rollout number ``extra`` of this step beyond its first; return its id."""
        config, step = self._context.config, state.step
        count, seed = config.trainer.tasks_per_step, data_seed(config.trainer.seed, state)
        rollout_id = f"train-{step:06d}" + (f"-{extra}" if extra else "")
        if self._context.rank == 0:
            tasks = (
                extra_tasks(self._tasks, step, extra, count, seed)
                if extra
                else tasks_of_step(self._tasks, step, count, seed)
            )
            own_seed = drawn_seed(seed, step, extra, EXTRA) if extra else seed * 1_000_003 + step
            sampling = {
                "temperature": config.rollout.temperature,
                "max_tokens": config.rollout.max_response_tokens,
                "seed": own_seed,
            }
            if "greedy" in self._algorithm.needs:
                sampling["greedy"] = True
            self._store.request_rollout(
                rollout_id, "train", step, version, tasks, config.algorithm.group_size, sampling
            )
        return rollout_id
