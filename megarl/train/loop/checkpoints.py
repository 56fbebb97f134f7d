"""Checkpoints of a running job: written between steps, and loaded on resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.buffer.order.draws import data_cursor
from megarl.buffer.order.group_choice import tasks_per_step
from megarl.buffer.store import Store
from megarl.core.errors import CheckpointError, DiskFullError, FencedError, NonRetryableError
from megarl.core.metrics import best_step
from megarl.core.schema import WeightsVersion
from megarl.learn.memory.phases import Phase
from megarl.train.inference.models import Models
from megarl.train.inference.resumed_facts import facts_of_ranks
from megarl.train.loop.remote_copies import RemoteCopies
from megarl.train.ranks import Ranks, Reporter, RunContext, TrainState
from megarl.weights.checkpoint.training import kept_state
from megarl.weights.checkpoint.training import state as saving
from megarl.weights.checkpoint.training.disk_space import free_space, on_rank_0, writing
from megarl.weights.checkpoint.training.manifest import (
    KEPT,
    SLOTS,
    complete,
    current_attempt,
    remove,
    steps_of,
    unfinished_name,
)


class Checkpointer:
    """Saves and restores models, optimizers and ``TrainState``. Every rank makes the same calls."""

    def __init__(self, context: RunContext, store: Store, ranks: Ranks, reporter: Reporter) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._reporter = reporter
        self._saved: TrainState | None = None
        """State in the newest checkpoint, finished or pending."""
        self._pending: saving.Save | None = None
        self._kept_bytes = 0
        """Bytes of this rank's last kept state."""
        self.failed = 0
        """Number of consecutive checkpoints that failed on a full disk."""
        self._copies = RemoteCopies(context, ranks, reporter)
        self._base: str | None = None
        """Digest of the base model of the actor's adapters, once known."""

    def _folder(self, *, warming_up: bool) -> Path:
        """Return the checkpoint folder of a phase. The warm start's steps need a separate folder: they precede step 0
        of the next phase."""
        return self._context.run_dir / "checkpoints" / ("warm_start" if warming_up else "")

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from; None at the very start. Every rank calls it and gets the same path."""
        return saving.newest(self._folder(warming_up=False), self._folder(warming_up=True))

    def resume(self, models: Models) -> TrainState:
        """Load the actor from the newest checkpoint, or from the run's first weights; return the matching state.

        Raises:
            CheckpointError: it cannot be loaded.
        """
        found = self.newest()
        fault = saving.unfounded_latest(self._folder(warming_up=False)) if self._context.rank == 0 else None
        if fault is not None:
            self._reporter.log(f"WARNING: {fault}; going on from {found or 'the beginning'}")
        models.make_actor(found)
        if found is None:
            models.load_beginning()
            return TrainState()
        if models.actor.model.adapters is not None:
            models.load_base()
        saving.load(found, {"actor": models.actor_part()})
        models.actor.optimizer.set_hyperparameters(self._context.config.trainer.optimizer)
        saved = saving.manifest_of(found)
        self._check_base(found, saved.get("made", {}), models)
        state = self._saved = TrainState.from_manifest(saved)
        before, now = saved.get("made", {}).get("data"), self._data_cursor(state)
        if before is not None and before != now:
            self._reporter.log(
                f"the order of the data is another than before: {found} was at {before}, with these settings it is at "
                f"{now}"
            )
        self._reporter.log(f"resumed from {found}")
        if found.parent == self._folder(warming_up=False):
            self._copies.begin(found)
        return state

    def _check_base(self, checkpoint: Path, made: Mapping[str, Any], models: Models) -> None:
        """Raise CheckpointError if a checkpoint's adapters are for another model than the actor's."""
        self._base = models.base_digest()
        if self._base is not None and made.get("base") != self._base:
            raise CheckpointError(
                f"{checkpoint} has adapters for a model with digest {made.get('base')}, and the model that was loaded "
                f"has {self._base}; give model.path the model that the run began with"
            )

    def put_random_states(self, models: Models) -> None:
        """Restore the newest checkpoint's random generators. Call it last: building models draws random numbers."""
        if (found := self.newest()) is not None and not saving.put_random_states(found, models.parts()):
            self._reporter.log(
                "random generators begin again from trainer.seed: the checkpoint was made on another grid"
            )

    def commit(
        self,
        state: TrainState,
        models: Models,
        enter: Callable[[Phase], None] | None = None,
        *,
        version: WeightsVersion | None = None,
        interval: bool = False,
        **labels: int,
    ) -> None:
        """Checkpoint models, optimizers and ``state``; do nothing if the newest checkpoint has ``state``.

        Args:
            enter: ``PhaseMemory.enter``, which loads a phase's memory onto the device; None without offloading.
            version: Last published weights.
            interval: A periodic checkpoint, which the job can skip. With ``trainer.async_checkpoint`` it counts once
                ``settle`` finds it written. On a full disk it is skipped, at most ``trainer.max_failed_checkpoints`` -
                1 times in a row. Any other counts on return.
            labels: Labels of the timeline phase.

        Raises:
            JobError: it cannot be written, or another attempt has taken over.
        """
        if state == self._saved and self._pending is None:
            self._finish_copies(state, interval=interval)
            return  # writing it again would use up the time limit of a stopping job
        with self._reporter.timeline.phase("checkpoint", **labels):
            self.settle(wait=True)
            if state == self._saved:
                self._finish_copies(state, interval=interval)
                return
            if enter is not None:
                enter(Phase.SAVE)
            folder = self._folder(warming_up=state.warming_up)
            self._base = self._base or models.base_digest()
            manifest = saving.Manifest(asdict(state), self._context.attempt, self._made(state, version, models))
            config = self._context.config.trainer
            background = interval and config.async_checkpoint
            try:
                with writing(folder):
                    self._pending = saving.begin(
                        folder, state.step, models.parts(), manifest, model=Path(self._context.config.model.path),
                        background=background, fence=self._fence,
                        free_space=lambda needed: free_space(
                            folder, needed, config.keep_checkpoints, refuse=interval, best=self._best(folder)
                        ),
                    )  # fmt: skip
            except DiskFullError as error:
                if not interval:
                    raise
                self._do_without(error)
                return
            self._saved = state
            if not background:
                self.settle(wait=True, needed=not interval)
            self._finish_copies(state, interval=interval)

    def keep(
        self, state: TrainState, models: Models, enter: Callable[[Phase], None], version: WeightsVersion | None,
        **labels: int,
    ) -> None:  # fmt: skip
        """Keep ``state`` on the nodes (``trainer.keep_state``). Without room there, training goes on without it.

        Raises:
            JobError: the manifest cannot be written, or another attempt has taken over.
        """
        with self._reporter.timeline.phase("keep", **labels):
            enter(Phase.SAVE)
            kept, fault = kept_state.of_process(), ""
            try:
                size = kept.save(state.step, models.parts())
            except OSError as error:
                fault = str(error)
            else:
                if not self._kept_bytes:
                    self._reporter.log(f"rank 0 keeps {size:,} bytes of state on its node after each step")
                self._kept_bytes = size
            if not self._ranks.agree(not fault):
                self._reporter.log(f"WARNING: step {state.step}: its state is not kept: {fault or 'no room on a node'}")
                return
            made = self._made(state, version, models)
            target = self._folder(warming_up=False) / KEPT / unfinished_name(state.step, self._context.attempt)

            def write() -> None:
                self._fence()
                with writing(target.parent):
                    remove(target)
                    for name in models.parts():
                        (target / name).mkdir(parents=True)
                    complete(target, asdict(state), made, {}, SLOTS)

            on_rank_0(write)

    def _finish_copies(self, state: TrainState, *, interval: bool) -> None:
        """Wait for the copy of a checkpoint that must count on return."""
        if not interval and not state.warming_up:
            self._copies.finish(self._folder(warming_up=False) / f"{saving.PREFIX}{state.step}")

    def _best(self, folder: Path, *more: int) -> int | None:
        """Return the best step by ``trainer.keep_best`` among the finished checkpoints in ``folder`` and steps
        ``more``; None if none is measured, in the warm start and on ranks other than 0."""
        metric = self._context.config.trainer.keep_best
        if metric is None or self._context.rank or folder != self._folder(warming_up=False):
            return None
        return best_step(self._context.run_dir, metric, {*steps_of(saving.finished(folder)), *more})

    @property
    def settling(self) -> bool:
        """True while a checkpoint waits for ``settle``."""
        return self._pending is not None

    def settle(self, *, wait: bool = False, needed: bool = False) -> None:
        """Count a checkpoint written in the background if all ranks have written it; ``wait``: wait for that.

        Args:
            needed: Raise on a full disk: the job cannot go on without this checkpoint.

        Raises: as ``commit``.
        """
        if self._pending is None or not (wait or self._ranks.agree(self._pending.written)):
            return
        pending, self._pending = self._pending, None
        self._copies.before_removal()
        try:
            with writing(pending.folder):
                best = self._best(pending.folder, pending.step)
                written = pending.finish(self._context.config.trainer.keep_checkpoints, best)
        except DiskFullError as error:
            self._saved = None
            if needed:
                raise
            self._do_without(error)
            return
        self.failed = 0
        if pending.folder == self._folder(warming_up=False):
            if self._context.rank == 0:
                shutil.rmtree(self._folder(warming_up=True), ignore_errors=True)  # a later one exists now
            self._copies.begin(written)

    def give_up(self) -> None:
        """Leave a pending checkpoint unfinished, after an error that other ranks may not have noticed."""
        if self._pending is not None:
            self._pending.give_up()
        self._copies.stop()

    def _do_without(self, error: DiskFullError) -> None:
        """Count a failed checkpoint. The store gets the count only with the step's metrics, because it may be on the
        same disk."""
        self.failed += 1
        if self.failed >= (limit := self._context.config.trainer.max_failed_checkpoints):
            raise NonRetryableError(
                f"{error}; {self.failed} checkpoints in a row had no room (trainer.max_failed_checkpoints={limit})"
            ) from error
        self._reporter.log(
            f"WARNING: {error}. Training goes on without this checkpoint ({self.failed} of at most {limit - 1} in a "
            f"row); the newest is {self.newest() or 'none'}"
        )

    def _made(self, state: TrainState, version: WeightsVersion | None, models: Models) -> dict[str, Any]:
        """Return the origin of a checkpoint, for users and for the log of a resumed job."""
        attempt = self._context.attempt
        return {
            "attempt": attempt,
            "version": str(version or WeightsVersion(attempt, 0)),
            "parallel": asdict(self._context.config.parallel),
            "data": self._data_cursor(state),
            "facts": facts_of_ranks(models),
            **({} if self._base is None else {"base": self._base}),
        }

    @cached_property
    def _num_tasks(self) -> int:
        return len(self._store.tasks.ids("train"))

    def _data_cursor(self, state: TrainState) -> dict[str, int] | None:
        """Return the position in the order of the data; None on ranks that write no manifest."""
        config = self._context.config
        if state.warming_up or self._context.rank:
            return None
        return data_cursor(self._num_tasks, state.step, tasks_per_step(config), config.trainer.seed)

    def _fence(self) -> None:
        """Return once a power cut can no longer delete the checkpoint's steps from the store.

        Raises FencedError if a later attempt has started: this one would overwrite its files.
        """
        attempt, run_dir = self._context.attempt, self._context.run_dir
        if (newest := current_attempt(run_dir)) > attempt:
            raise FencedError(
                f"attempt {attempt} of the run in {run_dir} writes no checkpoint: attempt {newest} has taken over; end "
                "what is left of the earlier one"
            )
        self._store.sync()
