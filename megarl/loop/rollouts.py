"""Asking the explorer for rollouts and waiting for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megarl.loop.session import Session

MEET_S = 30.0
"""How often ranks meet while they wait: a rollout may take longer than a collective waits for its ranks."""


def tasks_of_step(task_ids: list[str], step: int, count: int, seed: int) -> list[str]:
    """The ``count`` tasks of a step: every epoch is a new permutation of all tasks. A pure function, so a resumed run goes on."""
    order: list[str] = []
    first = step * count
    while len(order) < count:
        epoch, offset = divmod(first + len(order), len(task_ids))
        permutation = np.random.default_rng([seed, epoch]).permutation(len(task_ids))
        order += [task_ids[i] for i in permutation[offset : offset + count - len(order)]]
    return order


def request_training_rollout(s: Session) -> str:
    """Ask for this step's groups with the version last published; returns the rollout's id."""
    config = s.config
    rollout_id = f"train-{s.state.step:06d}"
    if s.position.rank == 0:
        s.store.request_rollout(
            rollout_id,
            "train",
            s.state.step,
            s.version,
            tasks_of_step(s.train_tasks, s.state.step, config.trainer.tasks_per_step, config.trainer.seed),
            config.algorithm.group_size,
            {
                "temperature": config.rollout.temperature,
                "max_tokens": config.rollout.max_response_tokens,
                "seed": config.trainer.seed * 1_000_003 + s.state.step,
            },
        )
    return rollout_id


def wait_for_rollout(s: Session, rollout_id: str, label: str) -> bool:
    """Wait on every rank until all groups are done, with a progress bar; False when the job is asked to stop."""
    with s.progress(None, label, "group") as bar:
        while True:
            done = s.position.rank != 0 or _follow(s, rollout_id, bar)
            if s.agree(done):
                return True
            if s.stop_requested():
                return False


def _follow(s: Session, rollout_id: str, bar: Any) -> bool:
    """Show the progress for up to ``MEET_S``; True when all groups are done, False early when asked to stop."""
    until = time.monotonic() + MEET_S
    while True:
        done, bar.total = s.store.progress(rollout_id)
        bar.update(done - bar.n)
        if done == bar.total or s.stop_flag or time.monotonic() > until:
            return done == bar.total
        time.sleep(s.config.store.poll_s)


def evaluate(s: Session, rollout_id: str) -> bool:
    """Greedy answers to every held-out task; records ``val/accuracy``. False when the job is asked to stop."""
    with s.timeline.phase("evaluation", step=s.state.step):
        if s.position.rank == 0:
            sampling = {"temperature": 0.0, "max_tokens": s.config.rollout.max_response_tokens}
            s.store.request_rollout(rollout_id, "eval", s.state.step, s.version, s.eval_tasks, 1, sampling)
        if not wait_for_rollout(s, rollout_id, "held-out tasks"):
            return False
    if s.position.rank == 0:
        answers = s.store.experiences(rollout_id)
        right = sum(e.reward.status == "ok" for e in answers)
        accuracy = right / len(s.eval_tasks)
        errors = sum(e.reward.status in ("error", "timeout") for e in answers)
        s.store.record_event("trainer", "evaluation", {"rollout_id": rollout_id, "step": s.state.step, "accuracy": accuracy})
        s.write(s.state.step, {"val/accuracy": accuracy, "val/error_rate": errors / len(s.eval_tasks)})
        s.say(f"held-out accuracy at step {s.state.step}: {accuracy:.1%} ({right} of {len(s.eval_tasks)} tasks, greedy)"
            + (f"; {errors} without a verdict" if errors else ""))
    return True
