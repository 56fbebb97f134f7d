"""Checks of sampling ahead, partial rollouts, updates in flight, and engines that sleep."""

from __future__ import annotations

import logging

from megarl.config import Config
from megarl.config.rewards import JUDGE_IS_ROLLOUT
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job

log = logging.getLogger(__name__)


def check_pacing(config: Config, job: Job) -> None:
    """Raise ConfigError if the staleness settings contradict each other or the job; warn without a correction."""
    sync = config.sync
    if sync.interval > sync.max_staleness + 1:
        raise ConfigError(
            f"sync.interval={sync.interval}: weights that are published every {sync.interval} steps are up to "
            f"{sync.interval - 1} steps behind, and sync.max_staleness={sync.max_staleness} allows fewer; set "
            f"sync.max_staleness={sync.interval - 1} or more, or sync.interval={sync.max_staleness + 1} or less"
        )
    if sync.order == "completion" and not sync.max_staleness:
        raise ConfigError(
            "sync.order=completion with sync.max_staleness=0: a step then has no other groups to take than its own; "
            "set sync.max_staleness to 1 or more, or sync.order=admission"
        )
    if config.algorithm.segments == "current" and not sync.max_staleness:
        raise ConfigError(
            "algorithm.segments=current with sync.max_staleness=0: one version of the weights samples a whole "
            "trajectory, so there are no earlier segments; set sync.max_staleness to 1 or more, or "
            "algorithm.segments=all"
        )
    _check_repeats(config)
    _check_budget(config)
    _check_pause(config)
    _check_eval_engines(config)
    _check_late(config)
    _check_deterministic(config, job)
    _check_cold(config, job)
    if config.rollout.spare and job.rollouts:
        log.warning(
            "rollout.spare=%d: of each group the trajectories that end last are cut, so short responses are trained "
            "more often than they are sampled; which are cut depends on time, so no run repeats bit for bit "
            "(docs/asynchrony.md)",
            config.rollout.spare,
        )
    if sync.max_staleness and job.rollouts and config.algorithm.correction == "none":
        log.warning(
            "sync.max_staleness=%d without algorithm.correction: earlier weights sample the tokens, and the loss "
            "treats them as the step's; set algorithm.correction=truncate (docs/algorithms.md)",
            sync.max_staleness,
        )


def _check_repeats(config: Config) -> None:
    """Raise ConfigError if repetition would never be checked, because responses have no segments."""
    rollout = config.rollout
    if rollout.max_repeats is not None and rollout.segment_tokens is None:
        raise ConfigError(
            f"rollout.max_repeats={rollout.max_repeats} without rollout.segment_tokens: repetition is looked for after "
            "each segment; set rollout.segment_tokens, or leave rollout.max_repeats out"
        )


def _check_budget(config: Config) -> None:
    """Raise ConfigError for partial rollouts that could not be, or would never be, suspended."""
    sync, rollout = config.sync, config.rollout
    if not rollout.is_partial:
        return
    name, value, most = "rollout.budget_s", rollout.budget_s, ""
    if rollout.budget_tokens is not None:
        name, value, most = "rollout.budget_tokens", rollout.budget_tokens, f", to {rollout.budget_tokens} at most"
    given = f"{name}={value}"
    if rollout.segment_tokens is None:
        raise ConfigError(
            f"{given} without rollout.segment_tokens: responses are suspended between segments; set it{most}"
        )
    if rollout.budget_tokens is not None and rollout.segment_tokens > rollout.budget_tokens:
        raise ConfigError(
            f"{given} with rollout.segment_tokens={rollout.segment_tokens}: a segment is never cut, so it has no more "
            f"tokens than the budget; set rollout.segment_tokens={rollout.budget_tokens} or less"
        )
    if not sync.max_staleness:
        raise ConfigError(
            f"{given} with sync.max_staleness=0: every response is trained in the step that it is sampled for, so none "
            "is suspended; set sync.max_staleness to 1 or more"
        )
    if sync.order == "completion":
        raise ConfigError(
            f"{given} with sync.order=completion: responses go on over updates by themselves; leave "
            f"{name} out, or set sync.order=admission"
        )
    if sync.method == "checkpoint":
        raise ConfigError(
            f"{given} with sync.method=checkpoint: the trainer does not know when engines have the weights that "
            f"suspended trajectories wait for; set sync.method=direct, or leave {name} out"
        )
    if rollout.workflow == "agent":
        raise ConfigError(
            f"{given} with rollout.workflow=agent: an agent of others does not wait while the trainer computes; leave "
            f"{name} out"
        )


def _check_pause(config: Config) -> None:
    """Raise ConfigError for ``sync.pause=keep`` if no request is in flight when weights change."""
    sync = config.sync
    if sync.pause != "keep":
        return
    if config.rollout.is_colocated:
        raise ConfigError(
            "sync.pause=keep with rollout.placement=colocated: such engines have left when weights change, and no "
            "request is under way; set sync.pause=wait or rollout.placement=separate"
        )
    if sync.method == "checkpoint":
        raise ConfigError(
            "sync.pause=keep with sync.method=checkpoint: explore programs read the files when their engines are idle; "
            "set sync.pause=wait or sync.method=direct"
        )
    if not sync.max_staleness:
        raise ConfigError(
            "sync.pause=keep with sync.max_staleness=0: every group has ended before weights change, so that none is "
            "updated in flight; set sync.max_staleness to 1 or more and sync.order=completion, or sync.pause=wait"
        )
    if sync.order == "admission":
        raise ConfigError(
            "sync.pause=keep with sync.order=admission: groups of one version are what that order is for; set "
            "sync.order=completion or sync.pause=wait"
        )


def _check_eval_engines(config: Config) -> None:
    """Raise ConfigError for ``trainer.eval_engines`` that could not keep their weights, or have no evaluation."""
    trainer, rollout = config.trainer, config.rollout
    if not (count := trainer.eval_engines):
        return
    given = f"trainer.eval_engines={count}"
    if config.sync.pause != "keep":
        raise ConfigError(
            f"{given} with sync.pause={config.sync.pause}: all engines are then updated together; set sync.pause=keep, "
            "or leave trainer.eval_engines out"
        )
    if config.run.mode != "both":
        raise ConfigError(
            f"{given} with run.mode={config.run.mode}: engines of explore programs come and go; set run.mode=both, or "
            "leave trainer.eval_engines out"
        )
    if rollout.replicas <= count:
        raise ConfigError(
            f"{given} with rollout.replicas={rollout.replicas}: no engine is left for training during an evaluation; "
            f"set rollout.replicas to {count + 1} or more, or trainer.eval_engines to {rollout.replicas - 1} or less"
        )
    if not trainer.eval_interval:
        raise ConfigError(
            f"{given} with trainer.eval_interval=0: nothing is evaluated between steps; set trainer.eval_interval, or "
            "leave trainer.eval_engines out"
        )
    if config.reward.judge.url == JUDGE_IS_ROLLOUT:
        raise ConfigError(
            f"{given} with reward.judge.url={JUDGE_IS_ROLLOUT}: engines with other weights would judge an evaluation; "
            "set the URL of another judge, or leave trainer.eval_engines out"
        )


def _check_late(config: Config) -> None:
    """Raise ConfigError for a ``reward.late_steps`` that no group, or every group, would reach."""
    sync, late = config.sync, config.reward.late_steps
    if late is None:
        return
    # In admission order, after the first steps, a step's groups were requested at least this many steps before it.
    most = sync.max_staleness if sync.order == "completion" else sync.max_staleness + 1 - sync.interval
    if not 1 <= late <= most:
        how = f"sync.max_staleness={sync.max_staleness}, sync.interval={sync.interval}, sync.order={sync.order}"
        way = f"set it to 1 to {most}" if most else "raise sync.max_staleness"
        raise ConfigError(
            f"reward.late_steps={late}: with {how} a step waits for its groups after {most} steps at most; {way}, or "
            "leave it out to wait for rewards"
        )
    if config.algorithm.dynamic_sampling and sync.order == "admission":
        raise ConfigError(
            f"reward.late_steps={late} with algorithm.dynamic_sampling=true: further groups of a step were not asked "
            "for before it; leave late_steps out, or set sync.order=completion"
        )


def _check_cold(config: Config, job: Job) -> None:
    """Raise ConfigError if no engine can be started from weight files during a run."""
    if config.sync.cold_interval is None:
        return
    reasons = {
        "rollout.placement=colocated, whose engines come and go in each step": config.rollout.is_colocated,
        f"run.mode={config.run.mode}, whose engines are another program's": config.run.mode != "both",
        f"algorithm.name={config.algorithm.name}, which has no engines": not job.rollouts,
        "sync.pause=keep, with which requests are under way when weights change": config.sync.pause == "keep",
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"sync.cold_interval={config.sync.cold_interval} with {' and '.join(found)}; leave it out, or set "
            "rollout.placement=separate, run.mode=both and sync.pause=wait"
        )


def _check_deterministic(config: Config, job: Job) -> None:
    """Raise ConfigError for ``sync.deterministic`` with settings whose training data depend on timing."""
    sync, rollout = config.sync, config.rollout
    if not sync.deterministic or not job.rollouts:
        return
    by_time = {
        f"sync.order={sync.order}": sync.order == "completion",
        f"sync.method={sync.method}": sync.method == "checkpoint" and sync.max_staleness > 0,
        f"algorithm.dynamic_sampling=true, sync.interval={sync.interval}": config.algorithm.dynamic_sampling
        and sync.interval > 1,
        f"rollout.spare={rollout.spare}": rollout.spare > 0,
        f"rollout.budget_s={rollout.budget_s}": rollout.budget_s is not None,
        f"reward.late_steps={config.reward.late_steps}": config.reward.late_steps is not None,
        f"rollout.workflow={rollout.workflow}": rollout.workflow == "agent",
    }
    if found := [setting for setting, is_set in by_time.items() if is_set]:
        raise ConfigError(
            f"sync.deterministic=true with {' and '.join(found)}: time then decides what is trained, and no run "
            "repeats bit for bit; leave it out, or sync.deterministic"
        )


def check_replay(config: Config, job: Job) -> None:
    """Raise ConfigError if no step could replay groups, or never its whole share; warn without a correction."""
    replay, tasks = config.buffer.replay, config.trainer.tasks_per_step
    if not replay.share:
        return
    setting = f"buffer.replay.share={replay.share:g}"
    if not job.rollouts:
        raise ConfigError(f"{setting} in an offline job, which has no rollouts; leave it out")
    count = replay.num_groups(tasks)
    if not count:
        raise ConfigError(
            f"{setting} is less than one of trainer.tasks_per_step={tasks} groups; set it to {1 / tasks:g} or more, or "
            "to 0"
        )
    if replay.min_accuracy > replay.max_accuracy:
        raise ConfigError(
            f"buffer.replay.min_accuracy={replay.min_accuracy:g} is above "
            f"buffer.replay.max_accuracy={replay.max_accuracy:g}, so no group is between them; exchange them"
        )
    if replay.hardness and replay.min_accuracy == 1:
        raise ConfigError(
            f"buffer.replay.hardness={replay.hardness:g} never replays groups that are all right, and "
            "buffer.replay.min_accuracy=1 no others; set one of them to 0"
        )
    first = 1 + config.sync.max_staleness
    if replay.max_age < first:
        raise ConfigError(
            f"buffer.replay.max_age={replay.max_age}: with sync.max_staleness={config.sync.max_staleness} a group is "
            f"replayed after {first} steps at the earliest; set it to {first} or more"
        )
    again = min(replay.uses - 1, replay.max_age - first + 1)
    if count > (most := (tasks - count) * again):
        needed = -(-count // (tasks - count))
        raise ConfigError(
            f"{setting} replays {count} of trainer.tasks_per_step={tasks} groups, but the other {tasks - count} can be "
            f"replayed {most} times in all (buffer.replay.uses={replay.uses}, buffer.replay.max_age={replay.max_age}); "
            f"set uses to {needed + 1} or more and max_age to {needed + first - 1} or more, or lower the share"
        )
    if config.algorithm.correction == "none":
        log.warning(
            "%s without algorithm.correction: earlier weights have sampled the replayed tokens, and the loss "
            "treats them as the step's; set algorithm.correction=truncate (docs/algorithms.md)",
            setting,
        )
