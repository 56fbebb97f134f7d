"""The reinforcement-learning loop of one trainer rank: ``python -m megarl.loop trainer --config RUN/resolved.json``.

Reads top to bottom: sync, rollout, inference, update, commit.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from dataclasses import replace

import torch

from megarl import algorithms, ops
from megarl.config import Config, load_resolved
from megarl.errors import LastingError, MegarlError
from megarl.experience import Report
from megarl.loop.engines import Stopped
from megarl.loop.guard import RollBack, roll_back
from megarl.loop.rollouts import evaluate, training_groups
from megarl.loop.session import Session
from megarl.loop.step import estimate, filter_overlong, gather, infer, kl_coef, mismatch, score, update
from megarl.loop.warm_start import warm_start
from megarl.metrics import spread
from megarl.schema import Sample
from megarl.training import objectives

log = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Warm start when there is none yet, then ``trainer.steps`` steps; resumes from the newest checkpoint."""
    with Session(config) as s:
        if not warm_start(s):
            return
        s.begin_reinforcement_learning()
        try:
            finished = _reinforce(s)
        except Stopped as stopped:
            s.say(f"stopping in the middle of a weight sync ({stopped})")
            finished = False
        s.commit()
        if finished:
            s.export_hf(s.run_dir / "hf")
            s.finish()


def _reinforce(s: Session) -> bool:
    """All steps that are left and the last evaluation; False when the job is asked to stop before the end.

    Raises Stopped.
    """
    s.connect()
    while s.state.step < s.config.trainer.steps:
        try:
            if s.stop_requested() or not evaluate_when_due(s) or not step(s):
                return False
        except RollBack as bad:
            roll_back(s, bad)
    s.sync()
    return evaluate(s, "eval-after")


def evaluate_when_due(s: Session) -> bool:
    """Before the first step and every ``trainer.eval_interval`` steps, again by a job that resumes there.

    Returns:
        False when it was given up because the job is asked to stop.
    """
    number, interval = s.state.step, s.config.trainer.eval_interval
    if number and (not interval or number % interval):
        return True
    s.sync()
    return evaluate(s, f"eval-{number}" if number else "eval-before")


def step(s: Session) -> bool:
    """One step: False when it was given up because the job is asked to stop; nothing has changed then."""
    config, number = s.config, s.state.step
    s.timeline.reset()
    with s.timeline.phase("step", step=number):
        with s.timeline.phase("sync", step=number):
            report = s.sync()
            s.roles.refresh_when_due()
        groups = training_groups(s)
        if groups is None:
            return False
        if not groups.experiences:
            verified = groups.report
            raise LastingError(
                f"rollout {groups.rollout_ids[-1]} left nothing to train on: {verified.dropped}; {'; '.join(verified.messages)}"
            )
        for message in groups.report.messages:
            s.say(f"dropped from training: {message}")
        with s.timeline.phase("inference", step=number):
            experiences, metrics = score(s, groups.experiences)
        with s.timeline.phase("batch", step=number):
            batch = gather(s, experiences, s.demonstrations(len(experiences)))
            for held in (experiences, groups.experiences):
                held.clear()  # their arrays are in the batch
        with s.timeline.phase("inference", step=number):
            infer(s, batch)
            differences = mismatch(batch.sequences)
            filter_overlong(s, batch)
        with s.timeline.phase("update", step=number):
            settings = replace(config.algorithm, kl=replace(config.algorithm.kl, coef=kl_coef(s)))
            metrics |= estimate(s, batch)
            policy = objectives.policy(s.algorithm, settings, batch.sequences)
            metrics |= update(s, batch, policy, settings)
        # What the estimate says of rewards is with the KL that was taken off them.
        metrics = _experience_metrics(batch.experiences, groups.report) | metrics | differences | report
        s.end_step(metrics)
    s.record_step(metrics | groups.metrics, tokens=len(batch.sequences.tokens))
    return True


def _experience_metrics(experiences: list[Sample], verified: Report) -> dict[str, float]:
    lengths = [float(e.response_length) for e in experiences]
    scores = [e.reward.score for e in experiences]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in experiences])
    metrics["response_length/clip_ratio"] = sum(e.finish_reason == "length" for e in experiences) / len(experiences)
    metrics["training/accuracy"] = sum(e.reward.status == "ok" for e in experiences) / len(experiences)
    errors = verified.statuses.get("error", 0) + verified.statuses.get("timeout", 0)
    metrics["reward/error_rate"] = errors / max(1, sum(verified.statuses.values()))
    metrics["reward/dropped_groups"] = float(verified.groups - verified.kept)
    return metrics


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megarl.loop trainer", description="One rank of the trainer.")
    parser.add_argument("--config", required=True, help="resolved.json of the run")
    config = load_resolved(parser.parse_args(argv).config)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Megatron logs its settings and warns of every fusion that needs TransformerEngine or apex; `megarl doctor` says which.
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    run = train
    if algorithms.get(config.algorithm.name).offline:
        from megarl.loop import offline

        run = offline.train
    try:
        run(config)
    except MegarlError as error:
        log.error("trainer: %s", error)
        return LastingError.STATUS if isinstance(error, LastingError) else 1
    return 0

