"""The trainer's side of a weight sync: connect once, publish every version, and prove that the engines have it.

Every trainer rank makes the same calls. Rank 0 talks to the engines; the ranks talk to each other through the link's
key-value store, so that all of them learn how a publication ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property, partial, wraps
from itertools import pairwise
from traceback import clear_frames
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from megarl import pulse
from megarl.config.schema import Config
from megarl.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.parallel.grid import megatron_grid
from megarl.reshard.execute import Digests, Transport, bytes_of, compare, merge, send
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import VOCAB_MULTIPLE, vllm_layout
from megarl.reshard.plan import build_plan
from megarl.rollout.addresses import JobAddresses
from megarl.rollout.control import EngineControl
from megarl.rollout.watch import EngineWatch
from megarl.schema import WeightsVersion
from megarl.sync.link import Link, LinkAddress, join, open_store
from megarl.sync.shared import Lender, Places, machine, memory_file
from megarl.training.written import check_written

P = ParamSpec("P")
T = TypeVar("T")
_STATE_S = 10.0
"""How long a living engine may take to say how it is."""
_WORDS_S = 5.0
"""How long ranks wait for each other's account of a failure."""


PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""sync.probe_tolerance where it is not set."""


@dataclass(frozen=True)
class SyncReport:
    """What a publication took; the same on every rank."""

    seconds: float
    """From the first request to pause until every engine generates again."""
    pause_seconds: float
    transfer_seconds: float
    digest_seconds: float
    bytes: int
    """Sent over the link by all ranks together."""
    digests: int
    """Compared."""

    def metrics(self) -> dict[str, float]:
        return {f"sync/{name}": float(value) for name, value in asdict(self).items()}


class ProbeResult(NamedTuple):
    """Log-probs of the probe text on both sides: largest difference, and where it is."""

    max_difference: float
    position: int


def check_probe(engine: Sequence[float], trainer: Sequence[float], tolerance: float) -> ProbeResult:
    """Compares log-probs of the same fixed tokens, as the engine and the trainer compute them with the same weights.

    Raises:
        WeightsDiffer: they differ by more than ``tolerance`` or are not numbers; equal stored weights that compute
            something else (an old packed copy, stale keys and values, another rope) show here.
    """
    differences = [abs(e - t) for e, t in zip(engine, trainer, strict=True)]
    position = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
    largest = differences[position]
    if not largest <= tolerance:
        raise WeightsDiffer(
            f"after a sync the engine's log-prob of token {position + 1} of the probe text is {engine[position]:.6f}, the "
            f"trainer's {trainer[position]:.6f}: {largest:.2e} apart, more than sync.probe_tolerance={tolerance:g}; the "
            "stored weights agree, so the engine computes from other ones or computes another function"
        )
    return ProbeResult(largest, position)


def _patient(seconds: Callable[[Config], float]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a method in which all ranks may wait for the engines, and so be silent, for as long as that."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def patient(*args: P.args, **kwargs: P.kwargs) -> T:
            publisher = args[0]
            assert isinstance(publisher, WeightPublisher)
            with pulse.patience(seconds(publisher._config)):
                return method(*args, **kwargs)

        return patient

    return decorate


class WeightPublisher:
    """One trainer rank's end of the weight link.

    Args:
        config: Uses model.dtype, parallel, rollout (tp, replicas, start_timeout_s) and sync.
        layout: The trainer's: ``megatron_layout`` of config.parallel.
        hf_config: config.json of the model.
        rank: This process's rank in the layout.
        vocab_multiple: What the layout was built with; the engines rebuild it.
        addresses: Engines and link; read from the environment when not given.
        stopping: True once the job is asked to stop; ends the wait for engines that are not ready.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        hf_config: Mapping[str, Any],
        rank: int,
        *,
        vocab_multiple: int = VOCAB_MULTIPLE,
        addresses: JobAddresses | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        addresses = addresses or JobAddresses.from_environment()
        self._config = config
        self._stopping = stopping
        self._rank = rank
        self._num_trainers = layout.num_ranks
        self._vocab_multiple = vocab_multiple
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        rollout = config.rollout
        destination = vllm_layout(
            hf_config, rollout.tp, replicas=rollout.replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel
        )
        self._plan = build_plan(layout, destination)
        self._engines = [EngineControl(url, addresses.key, config.sync.timeout_s) for url in addresses.engines]
        world_size = layout.num_ranks + destination.num_ranks
        self._address = LinkAddress(
            addresses.link_host,
            addresses.link_port,
            generation=0,
            world_size=world_size,
            timeout_s=config.sync.timeout_s,
        )
        self._processes: list[str] = []
        """Of the engines, as the last ``connect`` found them."""
        self._patience_s = config.rollout.start_timeout_s + config.sync.timeout_s
        self._store: TCPStore | None = None
        self._count = 0
        self._keys: list[str] = []
        """Of the store, that rank 0 has told or heard, until it removes them."""
        self._memory = memory_file()
        self._link: Link | None = None
        self._lender: Lender | None = None
        self.transport: Transport | None = None
        """None until ``connect``, and again after a publication has failed."""

    @_patient(lambda config: config.rollout.start_timeout_s)
    def connect(self) -> None:
        """Waits for the engines and joins them in one group; again after a failure, to replace the broken group.

        Raises:
            EngineError, WeightSyncError: an engine is not ready in time, or refuses; every rank raises.
        """
        self._disconnect()
        self._processes = []
        if self._store is None:
            self._store = open_store(replace(self._address, timeout_s=self._patience_s), master=self._rank == 0)
        self._address = replace(self._address, generation=self._address.generation + 1)
        topic = f"connect/{self._address.generation}"
        if self._rank == 0:
            with self._deciding(topic) as told:
                start_s = self._config.rollout.start_timeout_s
                self._each(lambda i, engine: engine.wait_ready(start_s, stopping=self._stopping))
                self._processes = [state.process for state in self._each(lambda i, engine: engine.state())]
                answers = self._each(lambda i, engine: engine.workers("megarl_agree", self._init_info(i)))
                machines = [worker["machine"] for engine in answers for worker in engine]
                told["places"] = asdict(Places(machines, [self._lent_by(topic, rank) for rank in range(self._num_trainers)]))
        else:
            self._store.set(f"{topic}/{self._rank}", json.dumps([machine(), *self._memory]))
            told = self._hear(topic)
        places = Places(**told["places"]) if self._config.sync.shared_memory else Places()
        with ThreadPoolExecutor(len(self._engines)) as pool:
            joining = self._submit(pool, lambda i, engine: engine.init(self._init_info(i, places))) if self._rank == 0 else []
            try:
                link = join(self._store, self._address, self._rank, peers=self._num_trainers)
            except Exception as error:
                raise WeightSyncError("; ".join([f"the weight link could not be joined: {error}", *_failures(joining)])) from error
            _results(joining)
        self._plan = replace(self._plan, nearness=places.nearness())
        self._link, self._lender = link, Lender(link, places.workers_near(self._rank), self._memory)
        self.transport = self._lender

    def _lent_by(self, topic: str, rank: int) -> tuple[str, int, int]:
        """Machine and memory file of a trainer rank."""
        if rank == 0:
            return machine(), *self._memory
        assert self._store is not None
        key = f"{topic}/{rank}"
        self._store.wait([key], timedelta(seconds=self._patience_s))
        self._note(key)
        where, pid, descriptor = json.loads(self._store.get(key))
        return where, pid, descriptor

    @_patient(lambda config: config.sync.timeout_s)
    def publish(
        self, tensors: Mapping[str, torch.Tensor], version: WeightsVersion, *, written: Mapping[str, int], abort: bool = False
    ) -> SyncReport:
        """Sends this rank's local tensors (Megatron names, any float dtype); returns when every engine has proven to
        have all weights and generates again.

        Args:
            written: ``TrainedModel.written``: digests of what the optimizer last wrote, which ``tensors`` must have.
            abort: End the requests under way instead of waiting for them, which may take longer than an engine's answer.

        Raises:
            WeightSyncError: on every rank. The engines then refuse requests with the reason; ``connect`` and ``publish``
                bring them back. A WeightsDiffer on rank 0 when ``tensors`` are not what was written, or when all were sent and
                proven to be others.
        """
        if self.transport is None:
            raise WeightSyncError(f"weights {version} cannot be published without a link: call connect() first")
        self._count += 1
        self._pause: Literal["wait", "abort"] = "abort" if abort else "wait"
        topic = f"publish/{self._address.generation}.{self._count}"
        try:
            send = partial(self._send, tensors, written)
            return self._lead(topic, send, version) if self._rank == 0 else self._follow(topic, send)
        except BaseException:
            self._disconnect()
            raise

    @_patient(lambda config: config.sync.timeout_s)
    def probe(self, token_ids: Sequence[int], trainer_logp: Sequence[float]) -> float:
        """Largest difference of the log-probs of ``token_ids[1:]`` between this trainer and any engine.

        Every rank calls it; ``trainer_logp`` (len(token_ids) - 1, temperature 1) counts on rank 0 only.

        Raises:
            WeightSyncError: on every rank, when it is more than sync.probe_tolerance. The engines then refuse requests.
        """
        self._count += 1
        topic = f"probe/{self._address.generation}.{self._count}"
        if self._rank != 0:
            return self._hear(topic)["max_difference"]
        with self._deciding(topic) as told:
            tolerance = self._config.sync.probe_tolerance
            tolerance = PROBE_TOLERANCES[self._config.model.dtype] if tolerance is None else tolerance
            try:
                answers = self._each(lambda i, engine: engine.probe(token_ids))
                told["max_difference"] = max(check_probe(a, trainer_logp, tolerance).max_difference for a in answers)
            except WeightSyncError as error:
                self._close_engines(str(error))
                raise
        return told["max_difference"]

    def died(self) -> list[str]:
        """What became of engines that have ended since ``connect`` found them, be it that others are in their place by now. Empty on
        ranks other than 0, and when ``connect`` never found them: it has waited for them long enough."""

        def fate(i: int, engine: EngineControl) -> str | None:
            try:
                replaced = engine.state(timeout_s=_STATE_S).process != self._processes[i]
            except EngineError as error:
                return str(error)
            return f"the engine at {engine.url} has been replaced" if replaced else None

        return [found for found in self._each(fate) if found is not None] if self._processes else []

    def watch(self, version: WeightsVersion) -> EngineWatch:
        """Of the engines, which have this version (on rank 0; nobody's on others)."""
        return EngineWatch(self._engines if self._rank == 0 else [], str(version))

    # ---------------------------------------------------------------- one publication

    def _lead(self, topic: str, send: Callable[[], Digests], version: WeightsVersion) -> SyncReport:
        assert self._store is not None
        heard_by_all, self._keys = self._keys, []
        with self._deciding(f"{topic}/end") as told:
            try:
                report = self._drive(topic, send, version)
            except Exception as error:
                failure = "; ".join(
                    [f"weights {version} did not reach the engines whole: {error}", *self._others(topic)]
                )
                self._close_engines(failure)
                raise _kind(error)(failure) from error
            told.update(asdict(report))
        for key in heard_by_all:  # every rank has sent since, and so has heard what was told before
            self._store.delete_key(key)
        return report

    def _drive(self, topic: str, send: Callable[[], Digests], version: WeightsVersion) -> SyncReport:
        clock = [time.monotonic()]
        with self._deciding(f"{topic}/go"):
            self._each(lambda i, engine: engine.pause(self._pause))
            self._each(lambda i, engine: engine.start())
        clock.append(time.monotonic())
        sent = [self._transfer(send, version)]
        sent += [_decode(self._hear(f"{topic}/sent/{rank}")["digests"]) for rank in range(1, self._num_trainers)]
        self._each(lambda i, engine: engine.finish(str(version)))
        self._each(lambda i, engine: engine.reset_prefix_cache())
        clock.append(time.monotonic())
        count = self._prove(sent)
        clock.append(time.monotonic())
        self._each(lambda i, engine: engine.refuse(None))
        self._each(lambda i, engine: engine.resume())
        paused, transferred, proven = (b - a for a, b in pairwise(clock))
        return SyncReport(time.monotonic() - clock[0], paused, transferred, proven, self._bytes, count)

    @cached_property
    def _bytes(self) -> int:
        return bytes_of(self._plan.destination, self._dtype)

    def _transfer(self, send: Callable[[], Digests], version: WeightsVersion) -> Digests:
        with ThreadPoolExecutor(len(self._engines)) as pool:
            updating = self._submit(pool, lambda i, engine: engine.update({"version": str(version)}))
            try:
                sent = send()
            except Exception as error:
                raise _kind(error)("; ".join([str(error), *_failures(updating)])) from error
            _results(updating)
        return sent

    def _follow(self, topic: str, send: Callable[[], Digests]) -> SyncReport:
        self._hear(f"{topic}/go")
        try:
            with self._deciding(f"{topic}/sent/{self._rank}") as told:
                told["digests"] = _encode(send())
        except Exception as error:
            try:
                self._hear(f"{topic}/end", _WORDS_S)  # so that every rank ends with the same words
            except WeightSyncError as verdict:
                raise _kind(verdict)(f"{verdict} (here: {error})") from error
        return SyncReport(**self._hear(f"{topic}/end"))

    def _send(self, tensors: Mapping[str, torch.Tensor], written: Mapping[str, int]) -> Digests:
        assert self.transport is not None
        bucket = self._config.sync.bucket_bytes
        assert self._lender is not None
        try:
            check_written(tensors, written)
            digests = send(self._plan, self._rank, tensors, self.transport, dtype=self._dtype, bucket_bytes=bucket)
            self._lender.finish()
            return digests
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold sends under way, which would keep the link open
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._lender = self.transport = None

    def _prove(self, sent: Sequence[Digests]) -> int:
        """Compares what was sent with what every worker computes with; returns the number of digests."""
        got: Digests = {}
        answers = self._each(lambda i, engine: engine.workers("megarl_digests"))
        for rank, answer in enumerate(worker for engine in answers for worker in engine):
            got |= {(rank, name): int(digest, 16) for name, digest in answer.items()}
        compare(self._plan, merge(sent), got)
        return len(got)

    def _init_info(self, replica: int, places: Places | None = None) -> dict[str, Any]:
        """``megarl.sync.receiver.InitInfo`` for one engine."""
        rollout = self._config.rollout
        return {
            **asdict(self._address),
            "grid": asdict(megatron_grid(self._config.parallel)),
            "transformer_impl": self._config.model.transformer_impl,
            "places": asdict(places or Places()),
            "vocab_multiple": self._vocab_multiple,
            "kernels": self._config.trainer.kernels,
            "replicas": rollout.replicas,
            "replica": replica,
            "dtype": self._config.model.dtype,
            "bucket_bytes": self._config.sync.bucket_bytes,
            "fingerprint": self._plan.fingerprint,
        }

    # ---------------------------------------------------------------- engines (rank 0)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[[int, EngineControl], T]) -> list[Future[T]]:
        return [pool.submit(call, i, engine) for i, engine in enumerate(self._engines)]

    def _each(self, call: Callable[[int, EngineControl], T]) -> list[T]:
        """Calls every engine at once; raises the first failure when all have answered."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return _results(self._submit(pool, call))

    def _close_engines(self, reason: str) -> None:
        """Makes every engine that still answers refuse generation, and ready for another update."""
        for engine in self._engines:
            with suppress(EngineError):
                engine.refuse(reason)
                engine.workers("megarl_abandon_update")

    # ---------------------------------------------------------------- ranks among each other

    @contextmanager
    def _deciding(self, topic: str) -> Iterator[dict[str, Any]]:
        """Tells the other ranks under ``topic`` what the body puts into the dict, or the error that it raises."""
        assert self._store is not None
        self._note(topic)
        told: dict[str, Any] = {}
        try:
            yield told
        except BaseException as error:
            told = {"error": str(error) or type(error).__name__, "differs": isinstance(error, WeightsDiffer)}
            self._store.set(topic, json.dumps(told))
            raise
        self._store.set(topic, json.dumps(told))

    def _note(self, key: str) -> None:
        if self._rank == 0:
            self._keys.append(key)

    def _others(self, topic: str) -> list[str]:
        """What other ranks say about a transfer that has failed on rank 0."""
        said = []
        for rank in range(1, self._num_trainers):
            try:
                self._hear(f"{topic}/sent/{rank}", _WORDS_S / self._num_trainers)
            except WeightSyncError as error:
                said.append(f"rank {rank}: {error}")
        return said

    def _hear(self, topic: str, patience_s: float | None = None) -> dict[str, Any]:
        """What another rank tells under ``topic``; its error becomes a WeightSyncError here."""
        assert self._store is not None
        patience_s = patience_s or self._patience_s
        try:
            self._store.wait([topic], timedelta(seconds=patience_s))
        except dist.DistStoreError as error:
            raise WeightSyncError(f"no word of {topic} from another trainer rank in {patience_s:.0f} s") from error
        self._note(topic)
        told = json.loads(self._store.get(topic))
        if "error" in told:
            raise (WeightsDiffer if told["differs"] else WeightSyncError)(told["error"])
        return told


def _kind(error: Exception) -> type[WeightSyncError]:
    """The type of an error that tells of ``error``."""
    return WeightsDiffer if isinstance(error, WeightsDiffer) else WeightSyncError


def _results(futures: Sequence[Future[T]]) -> list[T]:
    return [future.result() for future in futures]


def _failures(futures: Sequence[Future[Any]]) -> list[str]:
    """What the engines say, which explains more than a lost connection; waits a moment for one about to say it."""
    done, _ = wait(futures, timeout=1.0)
    return [str(error) for future in done if (error := future.exception()) is not None]


def _encode(digests: Digests) -> list[tuple[int, str, int]]:
    return [(rank, tensor, digest) for (rank, tensor), digest in digests.items()]


def _decode(digests: Sequence[tuple[int, str, int]]) -> Digests:
    return {(rank, tensor): digest for rank, tensor, digest in digests}
