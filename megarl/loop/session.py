"""What one trainer rank holds for the length of a job, and how ranks agree."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from megarl import algorithms, pulse
from megarl.batching import Sequences
from megarl.checkpoint import hf, state
from megarl.checkpoint import writer as checkpoint_writer
from megarl.checkpoint.manifest import current_attempt
from megarl.checkpoint.room import make_room, writing
from megarl.config import Config, to_dict
from megarl.config.lengths import prompt_tokens
from megarl.errors import CheckpointError, DiskFullError, FencedError, LastingError
from megarl.loop import engines
from megarl.loop.guard import Guard
from megarl.loop.reading import NodeReader
from megarl.loop.roles import Roles
from megarl.loop.rollouts import Demonstration, ExpertRows, News, data_seed, num_expert_rows
from megarl.metrics import CONSOLE, MetricWriter, Sums, Timeline, console_line
from megarl.parallel import groups
from megarl.reshard.layouts import hf_layout
from megarl.reshard.plan import build_plan
from megarl.schema import WeightsVersion
from megarl.store import Store
from megarl.sync.publish import WeightPublisher
from megarl.tasksets import ChatTokenizer
from megarl.tracking import Run, open_trackers
from megarl.training.model import TrainedModel, cut_for
from megarl.training.schedule import Head

log = logging.getLogger(__name__)


ALL_STEPS = 2**31


@dataclass(frozen=True)
class State:
    """What a checkpoint's manifest holds beside model and optimizer."""

    phase: str = "warm_start"
    step: int = 0
    """Completed steps of the phase."""
    kl_coef: float | None = None
    """Of the step to come, where it adapts; None is ``algorithm.kl.coef``."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint because of a bad update; the tasks of a step and its seeds depend on it."""
    grad_norms: Mapping[str, list[float]] = field(default_factory=dict)
    """Model -> norms of its last updates, where spikes are looked for."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> State:
        """From a manifest; an earlier megarl's has less."""
        return cls(**{name.name: saved[name.name] for name in fields(cls) if name.name in saved})


class Session:
    """One rank's models, store, links and bookkeeping. Use as a context manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run_dir = Path(config.run.dir)
        self.attempt = int(os.environ["MEGARL_ATTEMPT"])
        self.stop_flag = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
        if config.trainer.async_checkpoint:
            checkpoint_writer.of_process()  # before models and a GPU: it is a fork of this process
        self.position = groups.initialize(config.parallel, seed=config.trainer.seed, timeout_s=groups.patience_s(config.cluster.stall_s))  # seeds torch's generators too
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        self.timeline = Timeline(self.run_dir / "timeline", f"trainer_{self.position.rank}")
        born = psutil.Process().create_time()
        self.timeline.add("start", born, time.time() - born, attempt=self.attempt)
        self.store = Store(config.store.url, attempt=self.attempt, outage_s=config.store.outage_s)
        self.reader = NodeReader(groups.patience_s(config.cluster.stall_s) + config.store.outage_s)
        self.news = News(self.store)
        self.train_tasks = self.store.task_ids("train")
        self.eval_tasks = self.store.task_ids("eval")
        self.algorithm = algorithms.get(config.algorithm.name)
        self.hf_config = hf.read_hf_config(Path(config.model.path))
        self.head = Head(int(self.hf_config["vocab_size"]), config.rollout.temperature, config.trainer.logits_bytes, config.model.head_dtype == "float32")
        self.version = WeightsVersion(self.attempt, 0)
        self.roles = Roles(self)
        self._expert: ExpertRows | None = None
        if "expert" in self.algorithm.needs:
            assert config.taskset.expert is not None, "checked before launch"
            self._expert = ExpertRows.read(config.taskset.expert, ChatTokenizer.of(config))
        self.publisher: WeightPublisher | None = None
        self._saved: State | None = None
        """What the newest checkpoint holds, be it finished or pending."""
        self._pending: state.Save | None = None
        self._failed_saves = 0
        """In a row, for want of room."""
        self.guard = Guard(self)
        pulse.become("between steps")
        with self.timeline.phase("load"), self.starting():
            self.actor = self._language_model()
            self.state = self.resume()
        self.writer = None
        if self.position.rank == 0:
            warm_start_step, step = self._recorded()
            self.writer = MetricWriter(
                self.run_dir,
                warm_start_step=warm_start_step,
                step=step,
                tensorboard="tensorboard" in config.trainer.trackers,
                trackers=open_trackers(config.trainer.trackers, Run(config.run.name, self.run_dir, to_dict(config))),
            )

    def starting(self) -> AbstractContextManager[None]:
        """What a start waits for may take its time."""
        return pulse.patience(self.config.rollout.start_timeout_s)

    def _recorded(self) -> tuple[int, int]:
        """Up to which step of the warm start, and of what follows it, metrics count."""
        warming_up = self.state.phase == "warm_start"
        return self.state.step if warming_up else ALL_STEPS, -1 if warming_up else self.state.step

    def drop_later_metrics(self) -> None:
        """Those of steps that the run has gone back behind."""
        if self.writer is not None:
            self.writer.rewind(*self._recorded())

    def _folder(self, phase: str) -> Path:
        """Of a phase's checkpoints: apart, because a higher step of the warm start comes before step 0 of what follows."""
        return self.run_dir / "checkpoints" / ("warm_start" if phase == "warm_start" else "")

    def _language_model(self) -> TrainedModel:
        config = self.config
        cut = cut_for(config.parallel, config.trainer)
        return TrainedModel(self.hf_config, config.model, config.parallel, self.head, cut, config.trainer.optimizer)

    def resume(self) -> State:
        """The actor as the newest checkpoint has it, or as the run begins; returns what goes with it."""
        found = self.newest_checkpoint()
        if self.position.rank == 0 and (fault := state.unfounded_latest(self._folder("rl"))) is not None:
            self.say(f"WARNING: {fault}; going on from {found or 'the beginning'}")
        if found is None:
            self.actor.load_hf(Path(self.config.model.path))
            return State()
        saved = state.manifest_of(found)
        self.load_parts(found, {"actor": self._actor_part()})
        self.actor.optimizer.set_hyperparameters(self.config.trainer.optimizer)
        cursor = saved.get("made", {}).get("data")
        if cursor is not None and cursor != self._data_cursor(saved["phase"], saved["step"]):
            self.say(f"the order of the data is another than before: {found} was at {cursor}, with these settings it is at "
                f"{self._data_cursor(saved['phase'], saved['step'])}")
        resumed = self._saved = State.of(saved)
        self.say(f"resumed from {found}")
        return resumed

    def newest_checkpoint(self) -> Path | None:
        """What the session resumes from, the same on every rank, all of which call it; None at the very start."""
        return state.newest(self._folder("rl"), self._folder("warm_start"))

    def load_parts(self, checkpoint: Path, parts: Mapping[str, state.Part]) -> None:
        """Models and optimizers of a checkpoint. Raises CheckpointError."""
        try:
            state.load(checkpoint, parts)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{checkpoint} cannot be loaded ({type(error).__name__}: {error}); remove it to resume from the one before it"
            ) from error

    def _actor_part(self) -> state.Part:
        return state.Part(self.actor.chunks, self.actor.optimizer.inner)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pending is not None:  # only after an error, of which other ranks may know nothing yet
            self._pending.give_up()
        if self.writer is not None:
            self.writer.close()
        self.store.close()

    def begin_reinforcement_learning(self) -> None:
        """Optimizer fresh at step 0; the other roles, which begin with the weights that the warm start left. Again after a rollback."""
        if self.state.step == 0:
            self.actor.optimizer.restart(self.config.trainer.optimizer)
            self.export_hf(self.run_dir / "reference")
        self.actor.head = self.head
        gc.unfreeze()  # after a rollback, models that are replaced
        with self.timeline.phase("load"), self.starting():
            self.roles.build()
        gc.collect()
        gc.freeze()  # modules and models stay: a collection that walks them takes 0.3 s of every fourth step of the quickstart
        if self.state.step:
            self.put_random_states()

    def put_random_states(self) -> None:
        """Those of the checkpoint that the session resumed from. After all models are built: that draws numbers."""
        if (found := self.newest_checkpoint()) is not None and not state.put_random_states(found, self._parts()):
            self.say("random generators begin anew from trainer.seed: the checkpoint was made on another grid")

    def demonstrations(self, usual: int) -> list[Demonstration]:
        """Expert rows of the step beside ``usual`` sampled ones; [] where the algorithm has none."""
        if self._expert is None:
            return []
        ratio = self.config.algorithm.expert_ratio
        return self._expert.of_step(self.state.step, num_expert_rows(usual, ratio), data_seed(self))

    # ---------------------------------------------------------------- ranks agree

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop_flag = True

    def stop_requested(self) -> bool:
        """The same answer on every rank: has any of them been asked to stop?"""
        return not self.agree(not self.stop_flag)

    def agree(self, yes: bool) -> bool:
        """True on all ranks when it is True on all ranks."""
        pulse.mark()
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def gather(self, mine: Sequence[Sums]) -> list[Sums]:
        """All ranks' metric sums, on every rank."""
        everyone: list[list[Sums]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine))
        return [sums for rank in everyone for sums in rank]

    # ---------------------------------------------------------------- weights and files

    def connect(self) -> None:
        """Wait for the engines, and join them for weight syncs."""
        with self.timeline.phase("wait_for_engine"):
            self.publisher = WeightPublisher(
                self.config, self.actor.layout, self.hf_config, self.position.rank, stopping=lambda: self.stop_flag
            )
            engines.connect(self)

    def sync(self) -> dict[str, float]:
        """Publish the actor's weights to every engine under a new version, proven equal; returns sync metrics."""
        self.version = WeightsVersion(self.attempt, self.version.n + 1)
        return engines.publish(self)

    def probe(self) -> float:
        """Largest log-prob difference between this trainer and the engines on a short fixed text."""
        assert self.publisher is not None
        length = min(self.config.sync.probe_tokens, prompt_tokens(self.config.rollout))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.head.vocab_size, (length,), generator=generator)
        text = Sequences(tokens, torch.tensor([length]), torch.arange(length) < length - 1)
        logp = self.actor.answers(text, [self.actor.micro_batches(text)], temperature=1.0)
        return self.publisher.probe(tokens.tolist(), logp[:-1].tolist())

    def commit(self, *, interval: bool = False, **labels: int) -> None:
        """Checkpoint model, optimizer and state under the current step; nothing to do when that is what the newest holds.

        ``interval``: one of those between which a job can go on without. With ``trainer.async_checkpoint`` it counts once
        ``settle`` has found it written; on a full disk it is left out, ``trainer.max_failed_checkpoints`` - 1 times in a row.
        Any other counts when this returns.

        Raises:
            JobError: it cannot be written, or another attempt has taken over.
        """
        if self.state == self._saved and self._pending is None:
            return  # to write it again would take the seconds that a job has to end
        with self.timeline.phase("checkpoint", **labels):
            self.settle(wait=True)
            if self.state == self._saved:
                return
            folder = self._folder(self.state.phase)
            manifest = state.Manifest(asdict(self.state), self.attempt, self._made())
            config = self.config.trainer
            background = interval and config.async_checkpoint
            try:
                with writing(folder):
                    self._pending = state.begin(
                        folder, self.state.step, self._parts(), manifest, model=Path(self.config.model.path), background=background,
                        fence=self._fence, room=lambda needed: make_room(folder, needed, config.keep_checkpoints, refuse=interval),
                    )  # fmt: skip
            except DiskFullError as error:
                if not interval:
                    raise
                self._do_without(error)
                return
            self._saved = self.state
            if not background:
                self.settle(wait=True, needed=not interval)

    def settle(self, *, wait: bool = False, needed: bool = False) -> None:
        """Make a checkpoint count that is being written in the background, once all ranks have written it or after waiting for that.

        Args:
            needed: The job cannot go on without it, were the disk full.

        Raises: as ``commit``.
        """
        if self._pending is None or not (wait or self.agree(self._pending.written)):
            return
        pending, self._pending = self._pending, None
        try:
            with writing(pending.folder):
                pending.finish(self.config.trainer.keep_checkpoints)
        except DiskFullError as error:
            self._saved = None
            if needed:
                raise
            self._do_without(error)
            return
        self._failed_saves = 0
        if pending.folder == self._folder("rl") and self.position.rank == 0:
            shutil.rmtree(self._folder("warm_start"), ignore_errors=True)  # there is a later one now

    def _do_without(self, error: DiskFullError) -> None:
        """A checkpoint that had no room. The store is told by the step's metrics alone: it may lie on the same disk."""
        self._failed_saves += 1
        if self._failed_saves >= (limit := self.config.trainer.max_failed_checkpoints):
            raise LastingError(
                f"{error}; {self._failed_saves} checkpoints in a row had no room (trainer.max_failed_checkpoints={limit})"
            ) from error
        self.say(f"WARNING: {error}. Training goes on without this checkpoint ({self._failed_saves} of at most {limit - 1} in a row); "
            f"the newest is {self.newest_checkpoint() or 'none'}")

    @property
    def settling(self) -> bool:
        """Whether a checkpoint waits for ``settle``."""
        return self._pending is not None

    def _parts(self) -> dict[str, state.Part]:
        return {"actor": self._actor_part()} | self.roles.parts()

    def _made(self) -> dict[str, Any]:
        """By whom and with what a checkpoint is made: for people, and for what a resumed job says."""
        return {
            "attempt": self.attempt,
            "version": str(self.version),
            "parallel": asdict(self.config.parallel),
            "data": self._data_cursor(self.state.phase, self.state.step),
        }

    def _data_cursor(self, phase: str, step: int) -> dict[str, int] | None:
        """Where in the order of the training tasks the next step begins; the order itself is a function of the seed. None where it
        is rows of a file that are counted."""
        size, count = len(self.train_tasks), self.config.trainer.tasks_per_step
        if phase == "warm_start" or not size:
            return None
        epoch, offset = divmod(step * count, size)
        return {"seed": self.config.trainer.seed, "tasks": size, "epoch": epoch, "offset": offset}

    def _fence(self) -> None:
        """Return when the store would keep the steps that a checkpoint counts through a power cut.

        Raises FencedError when a later attempt has started: what this one writes would overwrite what that one does.
        """
        if (newest := current_attempt(self.run_dir)) > self.attempt:
            raise FencedError(
                f"attempt {self.attempt} of the run in {self.run_dir} writes no checkpoint: attempt {newest} has taken over; end "
                "what is left of the earlier one"
            )
        self.store.sync()

    def export_hf(self, target: Path) -> None:
        """Write the actor as an ordinary HF checkpoint."""
        plan = build_plan(self.actor.layout, hf_layout(self.hf_config, head="score" if self.actor.head is None else "lm"))
        with self.timeline.phase("export"), writing(target):
            hf.export_hf(plan, self.position.rank, self.actor.proven_tensors(), Path(self.config.model.path), target)
            dist.barrier()  # rank 0 writes; the others may read it next

    # ---------------------------------------------------------------- what a person sees

    def progress(self, total: int | None, label: str, unit: str) -> Any:
        """A progress bar on rank 0 of a terminal; silent elsewhere."""
        show = self.position.rank == 0 and os.environ.get("MEGARL_TTY") == "1"
        return tqdm(total=total, desc=label, unit=unit, leave=False, disable=not show, file=sys.stderr, ncols=100)

    def say(self, text: str) -> None:
        """A line for a person, from rank 0."""
        if self.position.rank == 0:
            with suppress(OSError):  # the log may lie on a full disk
                tqdm.write(text, file=sys.stderr)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.writer is not None:
            self.writer.write(step, metrics)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """A finished step's metrics: to the writers and the store."""
        self.write(step, metrics)
        self.keep(step, metrics)

    def keep(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics to the store; a later call replaces them."""
        if self.position.rank == 0:
            self.store.record_step(step, metrics)

    def end_step(self, metrics: dict[str, float]) -> None:
        """Count the step, and checkpoint where that is due."""
        config, number = self.config.trainer, self.state.step
        self.settle()
        self.state = replace(self.state, step=number + 1)
        metrics |= {"training/global_step": float(self.state.step), "training/attempt": float(self.attempt)}
        metrics["checkpoint/failed"] = float(self._failed_saves)
        if self.state.step % config.checkpoint_interval == 0 and self.state.step < config.steps:
            # A job that is killed after its checkpoint resumes behind this step: its metrics must be there by then.
            self.keep(self.state.step, metrics)
            self.commit(interval=True, step=number)
            metrics["checkpoint/failed"] = float(self._failed_saves)

    def record_step(self, metrics: dict[str, float], *, tokens: int, console: Iterable[tuple[str, str, str]] = CONSOLE) -> None:
        """The metrics of the step that has ended, with what its phases took, and a line for a person."""
        seconds = self.timeline.seconds
        metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
        metrics |= {"perf/total_num_tokens": float(tokens), "perf/time_per_step": seconds["step"]}
        metrics["perf/throughput"] = tokens / (seconds["step"] * num_devices(self.config, offline=self.algorithm.offline))
        self.record(self.state.step, metrics)
        self.say(console_line(self.state.step, self.config.trainer.steps, metrics, console))

    def finish(self) -> None:
        """Tell the explorer that no more work comes."""
        if self.position.rank == 0:
            self.store.close_job()
        dist.barrier()


def num_devices(config: Config, *, offline: bool) -> int:
    """Devices of a job: one for each trainer rank and each engine worker."""
    rollout = config.rollout
    return config.parallel.world_size + (0 if offline else rollout.replicas * rollout.tp * rollout.pp)
