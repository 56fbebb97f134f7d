"""One publication of weights, through links or as files (``sync.method=checkpoint``).

Rank 0 leads. It exchanges messages with the other trainer ranks, so that all of them learn how the publication ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import torch
from torch import distributed as dist

from megarl.config.schema import Config
from megarl.core.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.core.published import FOLDER, PublishedWeights, folder_of, remove_old
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineState, Pause
from megarl.engines.client.probe import Probed, ProbeText
from megarl.learn.training.optimizer import check_written
from megarl.train.sync.connection import RankMessages
from megarl.train.sync.fleet import EngineFleet, failures, results
from megarl.weights.checkpoint.formats.hf import export_hf
from megarl.weights.checkpoint.training.disk_space import writing
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.execute import Digests, compare, folds_of, merge
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import hf_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan

TRIED = "the engine has a test adapter, not the weights of a step"
"""Reason of refused requests while an engine has a test adapter."""
_FAILURE_S = 5.0
"""Seconds that ranks wait for each other's errors after a failure."""


@dataclass(frozen=True)
class SyncReport:
    """Seconds and bytes of a publication; the same on every rank."""

    seconds: float
    """Seconds from the first request to pause until every engine generates again."""
    pause_seconds: float
    """Seconds until the engines had paused; if requests are kept, until they resumed."""
    transfer_seconds: float
    digest_seconds: float
    bytes: int
    """Bytes sent over the link by all ranks together."""
    digests: int
    """Number of digests compared."""
    probe_diff_max: float | None = None
    """Largest difference of the probe's log-probs, if the publication included the probe."""

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics under ``sync/``."""
        return {f"sync/{name}": float(value) for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def of_parts(parts: Sequence[SyncReport]) -> SyncReport:
        """Combine the reports of consecutive publications: sums, and the longest pause."""
        probed = [part.probe_diff_max for part in parts if part.probe_diff_max is not None]
        return SyncReport(
            seconds=sum(part.seconds for part in parts),
            pause_seconds=max((part.pause_seconds for part in parts), default=0.0),
            transfer_seconds=sum(part.transfer_seconds for part in parts),
            digest_seconds=sum(part.digest_seconds for part in parts),
            bytes=sum(part.bytes for part in parts),
            digests=sum(part.digests for part in parts),
            probe_diff_max=max(probed, default=None),
        )


class Delivery(Protocol):
    """Delivery of weights to engines: over links (``WeightPublisher``) or as files (``FilePublisher``). Every trainer
    rank makes the same calls."""

    def connect(self) -> None:
        """Prepare for publications, at the start and whenever the engines change."""

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        abort: bool = False,
        probe: ProbeText | None = None,
    ) -> SyncReport:
        """Deliver a version, verified by digests."""

    def probe(self, text: ProbeText) -> float | None:
        """Compare log-probs of a text with the engines; return the largest difference, if known."""


class Publication:
    """One publication of a weights version.

    Args:
        topic: Prefix of its messages, never used before.
        changed: True if the plan covers only what training changes; the engines have the rest.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        messages: RankMessages,
        plan: ReshardPlan,
        topic: str,
        version: WeightsVersion,
        *,
        changed: bool = False,
    ) -> None:
        self._fleet, self._messages, self._plan = fleet, messages, plan
        self._part = {"part": "changed"} if changed else {}
        self._topic, self._version = topic, version
        self._num_trainers = plan.source.num_ranks

    def lead(
        self,
        send: Callable[[], Digests],
        pause: Pause,
        nbytes: int,
        probe: ProbeText | None = None,
        *,
        opens: bool = True,
    ) -> SyncReport:
        """Publish as rank 0: drive the engines and announce the end to the other ranks.

        Args:
            send: Sends this rank's tensors over the link.
            nbytes: Bytes sent over the link by all ranks together.
            probe: Compared before any kept or newly arrived request continues; None leaves the probe to the caller.
            opens: False keeps the engines refusing requests, except requests that verify them.
        """
        read_by_all = self._messages.read_by_all()
        with self._messages.announcing(f"{self._topic}/end") as message:
            try:
                report = self._drive(send, pause, nbytes, probe, opens)
            except Exception as error:
                what = f"weights {self._version} {_failure_text(error)}{self._where(pause)}"
                failure = "; ".join([f"{what}: {error}", *self._others()])
                self._fleet.close(failure)
                raise _kind(error)(failure) from error
            message.update(asdict(report))
        self._messages.remove(read_by_all)  # every rank has sent since, and so has received all earlier messages
        return report

    def _drive(
        self, send: Callable[[], Digests], pause: Pause, nbytes: int, probe: ProbeText | None, opens: bool
    ) -> SyncReport:
        clock = [time.monotonic()]
        differing: list[int] = []
        try:
            with self._messages.announcing(f"{self._topic}/go"):
                if not opens:
                    self._fleet.each(lambda i, engine: engine.refuse(TRIED))
                self._fleet.each(lambda i, engine: engine.pause(pause))
                self._fleet.each(lambda i, engine: engine.start())
            clock.append(time.monotonic())
            sent = self._transfer(send)
            folds = [folds_of(sent), *map(self._folds_sent, range(1, self._num_trainers))]
            self._fleet.each(lambda i, engine: engine.finish(str(self._version)))
            self._fleet.each(lambda i, engine: engine.reset_prefix_cache(running=pause == "keep"))
            self._fleet.each(lambda i, engine: self._check_version(engine.state()))
            clock.append(time.monotonic())
            differing, count = self._compare_folds(merge(folds))
        finally:
            with self._messages.announcing(f"{self._topic}/proof") as message:
                message["differing"] = differing
        if differing:
            self._compare_digests(sent, differing)
        clock.append(time.monotonic())
        if opens:
            self._fleet.each(lambda i, engine: engine.refuse(None, str(self._version)))
        with self._probing(probe) as probed:
            self._fleet.each(lambda i, engine: engine.resume())
            seconds = time.monotonic() - clock[0]
        paused, transferred, proven = (b - a for a, b in pairwise(clock))
        difference = None if probe is None else max(map(probe.check, results(probed)))
        return SyncReport(
            seconds, seconds if pause == "keep" else paused, transferred, proven, nbytes, count, difference
        )

    @contextmanager
    def _probing(self, probe: ProbeText | None) -> Iterator[list[Future[Probed]]]:
        """Request the probe's log-probs before the body resumes the engines; leaving the context waits for them.

        Nothing is decoded: resumed requests may leave no room for that, for an unknown time.
        """
        if probe is None:
            yield []
            return
        name = f"probe-{token_hex(8)}"
        with self._fleet.calling(lambda i, engine: engine.probe(probe.token_ids, first=name)) as probed:
            try:
                self._fleet.each(lambda i, engine: engine.await_queued(name, probed[i].done))
                yield probed
            except BaseException:
                with suppress(EngineError):  # an engine has died; live engines would keep their probes queued
                    self._fleet.each(lambda i, engine: engine.resume())
                raise

    def _transfer(self, send: Callable[[], Digests]) -> Digests:
        with self._fleet.calling(
            lambda i, engine: engine.update({"version": str(self._version), **self._part})
        ) as updating:
            try:
                sent = send()
            except Exception as error:
                raise _kind(error)("; ".join([str(error), *failures(updating)])) from error
            results(updating)
        return sent

    def _check_version(self, state: EngineState) -> None:
        """Raise WeightSyncError if an engine reports another version than the published one."""
        if state.version != str(self._version):
            raise WeightSyncError(f"the engine has version {state.version} after the update to {self._version}")

    def _folds_sent(self, rank: int) -> dict[int, int]:
        """Return the folded digests of what another rank sent, by destination rank."""
        return dict(self._messages.received(f"{self._topic}/sent/{rank}")["folds"])

    def _compare_folds(self, sent: Mapping[int, int]) -> tuple[list[int], int]:
        """Compare digests of what was sent with digests of every worker's memory. Return the destination ranks whose
        folds differ, and the number of digests in all folds."""
        answers = self._workers("megarl_digest_fold")
        got = {rank: int(answer["fold"], 16) for rank, answer in enumerate(answers)}
        differing = [rank for rank in sorted(sent.keys() | got.keys()) if sent.get(rank) != got.get(rank)]
        return differing, sum(answer["tensors"] for answer in answers)

    def _compare_digests(self, own: Digests, differing: Sequence[int]) -> None:
        """Raise WeightsDiffer, naming the tensors whose digests differ on these destination ranks."""
        topic = f"{self._topic}/digests"
        sent = [own, *(_decode(self._messages.posted(f"{topic}/{rank}")) for rank in range(1, self._num_trainers))]
        got: Digests = {}
        for rank, answer in enumerate(self._workers("megarl_digests")):
            got |= {(rank, name): int(digest, 16) for name, digest in answer.items()}
        compare(self._plan, _of_ranks(merge(sent), differing), _of_ranks(got, differing))
        raise WeightsDiffer(
            f"digests of the weights on destination ranks {list(differing)} add up to other numbers than those sent, "
            "and are equal now, tensor by tensor: a worker's memory changes; nothing is sampled with it"
        )

    def _workers(self, method: str) -> list[dict[str, Any]]:
        """Return the results of all workers, by destination rank."""
        answers = self._fleet.each(lambda i, engine: engine.workers(method))
        return [answer for engine in answers for answer in engine]

    def _where(self, pause: Pause) -> str:
        """Return text that names the engines if not all are meant; ranks in the error count from their first worker."""
        return f" (the engine at {', '.join(self._fleet.urls)})" if pause == "keep" else ""

    def _others(self) -> list[str]:
        """Return the errors of other ranks in a transfer that failed on rank 0."""
        errors = []
        for rank in range(1, self._num_trainers):
            try:
                self._messages.received(f"{self._topic}/sent/{rank}", _FAILURE_S / self._num_trainers)
            except WeightSyncError as error:
                errors.append(f"rank {rank}: {error}")
        return errors

    def follow(self, send: Callable[[], Digests], rank: int) -> SyncReport:
        """Publish as another rank: send after rank 0 has paused the engines, and wait for the result."""
        self._messages.received(f"{self._topic}/go")
        try:
            with self._messages.announcing(f"{self._topic}/sent/{rank}") as message:
                sent = send()
                message["folds"] = list(folds_of(sent).items())
        except Exception as error:
            try:
                self._messages.received(f"{self._topic}/end", _FAILURE_S)  # so that every rank has one error text
            except WeightSyncError as verdict:
                raise _kind(verdict)(f"{verdict} (here: {error})") from error
        differing = self._messages.received(f"{self._topic}/proof")["differing"]
        if differing:
            self._messages.post(f"{self._topic}/digests/{rank}", _encode(_of_ranks(sent, differing)))
        return SyncReport(**self._messages.received(f"{self._topic}/end"))


def _failure_text(error: Exception) -> str:
    return "are refused" if isinstance(error, WeightsDiffer) else "did not reach the engines whole"


def _kind(error: Exception) -> type[WeightSyncError]:
    """Return the type of the error to raise because of ``error``."""
    return WeightsDiffer if isinstance(error, WeightsDiffer) else WeightSyncError


def _of_ranks(digests: Digests, ranks: Sequence[int]) -> Digests:
    return {key: digest for key, digest in digests.items() if key[0] in ranks}


def _encode(digests: Digests) -> list[tuple[int, str, int]]:
    return [(rank, tensor, digest) for (rank, tensor), digest in digests.items()]


def _decode(digests: Sequence[tuple[int, str, int]]) -> Digests:
    return {(rank, tensor): digest for rank, tensor, digest in digests}


class FilePublisher:
    """Publishes weights as files. Every trainer rank makes the same calls; rank 0 writes.

    It has no contact with engines: the explore programs start, stop and verify them.

    Args:
        layout: The trainer's layout, ``megatron_layout`` of config.parallel.
        hf_config: config.json of the model.
        rank: This process's rank in the layout.
    """

    def __init__(self, config: Config, layout: Layout, hf_config: Mapping[str, Any], rank: int) -> None:
        self._config, self._rank = config, rank
        self._layouts = layout, hf_layout(hf_config)
        self._plan: ReshardPlan | None = None
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._unproven: tuple[WeightsVersion, dict[str, str]] | None = None
        """Version with written files, and its digests, until ``probe`` completes it; on rank 0."""

    def connect(self) -> None:
        """Plan the transfer of each slice into the files, and make the versions' folder. Raises WeightSyncError on rank
        0 if that fails."""
        self._plan = build_plan(*self._layouts)
        folder = Path(self._config.run.dir) / FOLDER
        try:
            if self._rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightSyncError(f"weights cannot be published in {folder}: {error}") from error

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        abort: bool = False,
        probe: ProbeText | None = None,
    ) -> SyncReport:
        """Write the weights' files; they count once ``probe`` has completed them.

        Args:
            tensors: This rank's local tensors (Megatron names, any float dtype).
            written: ``Model.written``: digests that ``tensors`` must have.
            abort, probe: Not used: the readers decide about requests, and ``probe`` is a separate call.

        Raises:
            WeightsDiffer: on every rank, if a rank's ``tensors`` differ from what was written.
            JobError: on rank 0, if the files cannot be written.
        """
        began, config, plan = time.monotonic(), self._config, self._plan
        if plan is None:
            raise WeightSyncError(f"weights {version} cannot be published without a plan: call connect() first")
        _check_written(tensors, written)
        target = folder_of(Path(config.run.dir), version)
        with heartbeat.timeout(config.sync.timeout_s), writing(target):
            source, bucket = Path(config.model.path), config.sync.bucket_bytes
            mine = export_hf(plan, self._rank, tensors, source, target, dtype=self._dtype, bucket_bytes=bucket)
        parts: list[dict[str, int]] | None = [{}] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(mine, parts)
        total = merge({(0, name): digest for name, digest in part.items()} for part in parts or ())
        digests = {name: f"{digest:016x}" for (_, name), digest in total.items()}
        self._unproven = (version, digests) if self._rank == 0 else None
        seconds = time.monotonic() - began
        nbytes = bytes_of(plan.destination, self._dtype)
        return SyncReport(seconds, 0.0, seconds, 0.0, nbytes, 0)

    def probe(self, text: ProbeText) -> None:
        """Complete the version with the probe text and the trainer's log-probs, which the readers' engines must match.

        Raises WeightSyncError on rank 0 if the manifest cannot be written.
        """
        if self._unproven is None:
            return
        (version, digests), self._unproven = self._unproven, None
        run_dir = Path(self._config.run.dir)
        manifest = PublishedWeights(
            str(version), digests, text.token_ids, text.trainer_logp, text.tolerance, text.decode
        )
        try:
            manifest.write(folder_of(run_dir, version))
            remove_old(run_dir)
        except OSError as error:
            raise WeightSyncError(f"weights {version} cannot be published in {run_dir}: {error}") from error


def _check_written(tensors: Mapping[str, torch.Tensor], written: Mapping[str, int]) -> None:
    """Run ``check_written`` on all ranks together, so that no rank waits for elements that another does not send."""
    fault: WeightsDiffer | None = None
    try:
        check_written(tensors, written)
    except WeightsDiffer as error:
        fault = error
    fine = torch.tensor([int(fault is None)])
    dist.all_reduce(fine, dist.ReduceOp.MIN)
    if not fine:
        raise fault or WeightsDiffer("another trainer rank's weights are not what was written; its log names them")
