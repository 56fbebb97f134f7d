"""The reinforcement-learning loop of one trainer rank: ``python -m megarl.loop trainer --config RUN/resolved.json``.

Reads top to bottom: sync, rollout, inference, update, commit.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from megarl import ops
from megarl.algorithms import group_stats
from megarl.batching import MicroBatch, Sequences, of_experiences, response_values
from megarl.config import Config, load_resolved
from megarl.errors import JobError
from megarl.experience import Report, shuffle_rewards, verify
from megarl.loop.rollouts import evaluate, request_training_rollout, wait_for_rollout
from megarl.loop.session import Session
from megarl.loop.warm_start import warm_start
from megarl.metrics import Sums, console_line, mean_of_sums, spread
from megarl.schema import Experience
from megarl.training import objectives
from megarl.training.optimizer import learning_rate

log = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Warm start when there is none yet, then ``trainer.steps`` steps; resumes from the newest checkpoint."""
    with Session(config) as s:
        if s.state.phase == "warm_start":
            if not warm_start(s):
                if s.state.step:
                    s.commit()
                return
            s.state = replace(s.state, phase="rl", step=0)
            s.commit()
        s.begin_reinforcement_learning()
        s.connect()
        while s.state.step < config.trainer.steps:
            if s.stop_requested() or not evaluate_when_due(s) or not step(s):
                s.commit()
                return
        s.sync()
        if not evaluate(s, "eval-after"):
            s.commit()
            return
        s.commit()
        s.export_hf(s.run_dir / "hf")
        s.finish()


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
        with s.timeline.phase("rollout", step=number):
            rollout_id = request_training_rollout(s)
            if not wait_for_rollout(s, rollout_id, f"rollout {number + 1}"):
                return False
        with s.timeline.phase("batch", step=number):
            experiences, verified = verify(s.store.experiences(rollout_id), config.reward, vocab_size=s.head.vocab_size)
            if config.reward.shuffle:
                experiences = shuffle_rewards(experiences, seed=config.trainer.seed * 1_000_003 + number)
        if not experiences:
            raise JobError(f"rollout {rollout_id} left nothing to train on: {verified.dropped}; {'; '.join(verified.messages)}")
        for message in verified.messages:
            s.say(f"dropped from training: {message}")
        with s.timeline.phase("batch", step=number):
            sequences = of_experiences(experiences)
            units = updates_of([[i] for i in range(len(sequences))], config.trainer.updates_per_step)
            plan = [s.actor.micro_batches(sequences, part) for part in units]
        with s.timeline.phase("inference", step=number):
            infer(s, sequences, plan)
            if s.position.rank == 0 and sequences.old_logp is not None:
                s.store.record_old_logp(experiences, response_values(sequences.old_logp, experiences))
            advantages = _advantages(s, experiences)
            sequences.advantages = torch.tensor(advantages, dtype=torch.float32)[sequences.row]
        sums: list[Sums] = []
        updates: list[Sums] = []
        with s.timeline.phase("update", step=number):
            if s.algorithm.restarts_optimizer:
                s.actor.optimizer.restart(config.trainer.optimizer)
            objective = objectives.policy(s.algorithm, config.algorithm, sequences)
            for i, batches in enumerate(plan):
                sums.append(s.actor.backward(sequences, batches, objective))
                lr = learning_rate(config.trainer.optimizer, number * config.trainer.updates_per_step + i)
                updates.append({"actor/grad_norm": (s.actor.step(lr), 1.0), "actor/lr": (lr, 1.0)})
        s.state = replace(s.state, step=number + 1)
        metrics = mean_of_sums(s.gather(sums)) | mean_of_sums(updates) | mean_of_sums([_mismatch(sequences)]) | report
        metrics |= _experience_metrics(experiences, advantages, verified)
        metrics |= {"training/global_step": float(s.state.step), "training/attempt": float(s.attempt)}
        if s.state.step % config.trainer.checkpoint_interval == 0 and s.state.step < config.trainer.steps:
            # A job that is killed after its checkpoint resumes behind this step: its metrics must be there by then.
            s.keep(s.state.step, metrics)
            s.commit(step=number)
    seconds = s.timeline.seconds
    metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
    metrics |= {f"rollout/{name}": v for name, v in s.store.rollout_metrics(rollout_id).items()}
    metrics["perf/throughput"] = sum(len(e.prompt_ids) + len(e.response_ids) for e in experiences) / seconds["step"]
    s.record(s.state.step, metrics)
    s.say(console_line(s.state.step, config.trainer.steps, metrics))
    return True


def updates_of(units: Sequence[list[int]], updates: int) -> list[list[list[int]]]:
    """Units in order in ``updates`` equal parts, fewer when there are fewer units."""
    updates = min(updates, len(units))
    cuts = [u * len(units) // updates for u in range(updates + 1)]
    return [list(units[start:end]) for start, end in itertools.pairwise(cuts)]


def infer(s: Session, sequences: Sequences, plan: Sequence[Sequence[MicroBatch]]) -> None:
    """Fill what the algorithm needs: log-probs under the weights that the update starts from, and the reference's."""
    if "old_logp" in s.algorithm.needs:
        sequences.old_logp = s.actor.answers(sequences, plan)
    if s.reference is not None:
        sequences.ref_logp = s.reference.answers(sequences, plan)


def _advantages(s: Session, experiences: list[Experience]) -> list[float]:
    """Of the whole step, the same on every rank: no rank's share decides what another's are."""
    rewards = [(e.reward.score, e.group_stats or group_stats([e.reward.score])) for e in experiences]
    return s.algorithm.advantages(rewards, [int(e.response_mask.sum()) for e in experiences], s.config.algorithm)


def _mismatch(sequences: Sequences) -> Sums:
    """How far the engine's log-probs are from the trainer's for the same weights and tokens."""
    if sequences.old_logp is None or sequences.engine_logp is None or not bool(sequences.mask.any()):
        return {}
    old, engine = sequences.old_logp[sequences.mask], sequences.engine_logp[sequences.mask]
    difference = (old - engine).abs()
    probability = (old.exp() - engine.exp()).abs()
    count = float(difference.numel())
    return {
        "training/rollout_logp_diff_mean": (float(difference.sum()), count),
        "training/rollout_probs_diff_mean": (float(probability.sum()), count),
        "max:training/rollout_logp_diff_max": (float(difference.max()), 1.0),
        "max:training/rollout_probs_diff_max": (float(probability.max()), 1.0),
    }


def _experience_metrics(experiences: list[Experience], advantages: list[float], verified: Report) -> dict[str, float]:
    lengths = [float(len(e.response_ids)) for e in experiences]
    scores = [e.reward.score for e in experiences]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores) | spread("critic/advantages", advantages)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(len(e.prompt_ids)) for e in experiences])
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
    try:
        train(config)
    except (ValueError, RuntimeError) as error:
        if type(error).__module__ != "megarl.errors":
            raise
        log.error("trainer: %s", error)
        return 1
    return 0

