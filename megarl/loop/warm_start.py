"""Supervised steps on demonstrations, through the same actor, schedule and optimizer as reinforcement learning."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import algorithms
from megarl.batching import of_demonstrations
from megarl.config.schema import AlgorithmConfig
from megarl.loop.guard import RollBack, roll_back
from megarl.loop.rollouts import data_seed, numbers_of_step
from megarl.metrics import mean_of_sums
from megarl.tasksets import ChatTokenizer, encode_demonstrations, read_rows
from megarl.training import objectives
from megarl.training.optimizer import learning_rate

if TYPE_CHECKING:
    from megarl.loop.session import Session

SAID_EVERY = 100
"""Steps between two lines where no progress bar is shown."""


def warm_start(s: Session) -> bool:
    """Bring the session to step 0 of what follows the warm start; False when the job is asked to stop before that, and saved."""
    while s.state.phase == "warm_start":
        try:
            ended = _run(s)
        except RollBack as bad:
            roll_back(s, bad)
            continue
        if not ended:
            if s.state.step:
                s.commit()
            return False
        s.state = replace(s.state, phase="rl", step=0, grad_norms={})  # of another loss
        s.commit()
    return True


def _run(s: Session) -> bool:
    """Run ``trainer.warm_start.steps`` steps, or those that are left; False when the job is asked to stop before the end."""
    config = s.config.trainer.warm_start
    if config.steps == 0:
        return True
    assert s.config.taskset.warm_start is not None, "checked before launch"
    sft, settings = algorithms.get("sft"), AlgorithmConfig(name="sft")  # every algorithm starts from the same weights
    rows = read_rows(Path(s.config.taskset.warm_start), require_response=True)
    pairs = encode_demonstrations(rows, ChatTokenizer.of(s.config))
    s.actor.head = replace(s.head, temperature=1.0)
    if s.state.step:
        s.actor.optimizer.set_hyperparameters(config.optimizer)
        s.put_random_states()
    else:
        s.actor.optimizer.restart(config.optimizer)
    begins = s.state.step
    with s.progress(config.steps, "warm start", "step") as bar, s.timeline.phase("warm_start"):
        bar.update(s.state.step)
        for step in range(s.state.step, config.steps):
            if s.stop_requested():
                return False
            s.settle()
            if step > begins and step % config.checkpoint_interval == 0:
                s.commit(interval=True)
            chosen = numbers_of_step(len(pairs), step, config.batch_size, data_seed(s))
            batch = of_demonstrations([pairs[i] for i in chosen])
            sums = s.actor.backward(batch, s.actor.micro_batches(batch), objectives.policy(sft, settings, batch))
            lr = learning_rate(config.optimizer, step)
            norm = s.actor.gradient_norm()
            s.guard.begin()
            metrics = {}
            if s.guard.admits("actor", sums, norm):
                s.actor.step(lr)
                metrics = mean_of_sums(s.gather([sums])) | {"actor/grad_norm": norm, "actor/lr": lr}
            metrics |= {name.replace("training/", "actor/"): value for name, value in s.guard.end().items()}
            s.state = replace(s.state, step=step + 1)
            s.write(step + 1, {name.replace("actor/", "sft/"): value for name, value in metrics.items()})
            loss = metrics.get("actor/loss", math.nan)  # of an update that was left out
            bar.set_postfix_str(f"loss {loss:.3f}")
            bar.update(1)
            if bar.disable and (step + 1) % SAID_EVERY == 0:
                s.say(f"warm start {step + 1}/{config.steps} | loss {loss:.3f}")
    return True
