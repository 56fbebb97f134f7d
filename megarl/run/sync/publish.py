"""The trainer's side of a weight sync: connect once, publish every version, and prove that the engines have it.

Every trainer rank makes the same calls. Rank 0 talks to the engines; the ranks talk to each other through the link's
key-value store, so that all of them learn how a publication ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial, wraps
from traceback import clear_frames
from typing import Any, ParamSpec, TypeVar

import torch

from megarl.core import heartbeat
from megarl.core.config.schema import Config, RolloutConfig
from megarl.core.errors import WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.explore.rollout.addresses import JobAddresses
from megarl.explore.rollout.watch import EngineWatch
from megarl.learn.parallel.grid import megatron_grid
from megarl.learn.training.written import check_written
from megarl.run.sync.fleet import EngineFleet, failures, results
from megarl.run.sync.link import Link, LinkAddress, join
from megarl.run.sync.messages import RankMessages
from megarl.run.sync.probe import PROBE_TOLERANCES, check_probe
from megarl.run.sync.publication import Publication, SyncReport
from megarl.run.sync.shared import Lender, Places, machine, memory_file
from megarl.weights.reshard.execute import Digests, Transport, bytes_of, send
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import VOCAB_MULTIPLE, vllm_layout
from megarl.weights.reshard.plan import build_plan

P = ParamSpec("P")
T = TypeVar("T")


def _with_timeout(seconds: Callable[[Config], float]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method in which all ranks may wait for the engines, and so be silent, for so many seconds."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
            publisher = args[0]
            assert isinstance(publisher, WeightPublisher)
            with heartbeat.timeout(seconds(publisher._config)):
                return method(*args, **kwargs)

        return bounded

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
        destination = _engine_layout(hf_config, config.rollout)
        self._plan = build_plan(layout, destination)
        self._fleet = EngineFleet(addresses, config.sync.timeout_s)
        world_size = layout.num_ranks + destination.num_ranks
        self._address = LinkAddress(
            addresses.link_host,
            addresses.link_port,
            generation=0,
            world_size=world_size,
            timeout_s=config.sync.timeout_s,
        )
        self._messages = RankMessages(rank, config.rollout.start_timeout_s + config.sync.timeout_s)
        self._count = 0
        self._memory = memory_file()
        self._link: Link | None = None
        self._lender: Lender | None = None
        self.transport: Transport | None = None
        """None until ``connect``, and again after a publication has failed."""

    @_with_timeout(lambda config: config.rollout.start_timeout_s)
    def connect(self) -> None:
        """Wait for the engines and join them in one group; again after a failure, to replace the broken group.

        Raises:
            EngineError, WeightSyncError: an engine is not ready in time, or refuses; every rank raises.
        """
        self._disconnect()
        self._fleet.forget_processes()
        self._messages.open(replace(self._address, timeout_s=self._messages.timeout_s))
        self._address = replace(self._address, generation=self._address.generation + 1)
        topic = f"connect/{self._address.generation}"
        if self._rank == 0:
            with self._messages.announcing(topic) as told:
                self._fleet.wait_ready(self._config.rollout.start_timeout_s, self._stopping)
                answers = self._fleet.each(lambda i, engine: engine.workers("megarl_agree", self._init_info(i)))
                machines = [worker["machine"] for engine in answers for worker in engine]
                posted = [self._messages.posted(f"{topic}/{rank}") for rank in range(1, self._num_trainers)]
                told["places"] = asdict(Places(machines, [[machine(), *self._memory], *posted]))
        else:
            self._messages.post(f"{topic}/{self._rank}", [machine(), *self._memory])
            told = self._messages.received(topic)
        places = Places(**told["places"]) if self._config.sync.shared_memory else Places()
        calls: AbstractContextManager[list[Future[Any]]] = nullcontext([])
        if self._rank == 0:
            calls = self._fleet.calling(lambda i, engine: engine.init(self._init_info(i, places)))
        with calls as joining:
            try:
                link = join(self._messages.store, self._address, self._rank, peers=self._num_trainers)
            except Exception as error:
                raise WeightSyncError(
                    "; ".join([f"the weight link could not be joined: {error}", *failures(joining)])
                ) from error
            results(joining)
        self._plan = replace(self._plan, nearness=places.nearness())
        self._link, self._lender = link, Lender(link, places.workers_near(self._rank), self._memory)
        self.transport = self._lender

    @_with_timeout(lambda config: config.sync.timeout_s)
    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: WeightsVersion,
        *,
        written: Mapping[str, int],
        abort: bool = False,
    ) -> SyncReport:
        """Send this rank's local tensors (Megatron names, any float dtype); return when every engine has proven to
        have all weights and generates again.

        Args:
            written: ``TrainedModel.written``: digests of what the optimizer last wrote, which ``tensors`` must have.
            abort: End the requests under way instead of waiting for them, which may take longer than an engine's
                answer.

        Raises:
            WeightSyncError: on every rank. The engines then refuse requests with the reason; ``connect`` and
                ``publish`` bring them back. A WeightsDiffer on rank 0 when ``tensors`` are not what was written, or
                when all were sent and proven to be others.
        """
        if self.transport is None:
            raise WeightSyncError(f"weights {version} cannot be published without a link: call connect() first")
        self._count += 1
        topic = f"publish/{self._address.generation}.{self._count}"
        publication = Publication(self._fleet, self._messages, self._plan, topic, version)
        send = partial(self._send, tensors, written)
        try:
            if self._rank != 0:
                return publication.follow(send, self._rank)
            return publication.lead(send, "abort" if abort else "wait", self._bytes)
        except BaseException:
            self._disconnect()
            raise

    @_with_timeout(lambda config: config.sync.timeout_s)
    def probe(self, token_ids: Sequence[int], trainer_logp: Sequence[float]) -> float:
        """Largest difference of the log-probs of ``token_ids[1:]`` between this trainer and any engine.

        Every rank calls it; ``trainer_logp`` (len(token_ids) - 1, temperature 1) counts on rank 0 only.

        Raises:
            WeightSyncError: on every rank, when it is more than sync.probe_tolerance. The engines then refuse requests.
        """
        self._count += 1
        topic = f"probe/{self._address.generation}.{self._count}"
        if self._rank != 0:
            return self._messages.received(topic)["max_difference"]
        with self._messages.announcing(topic) as told:
            tolerance = self._config.sync.probe_tolerance
            tolerance = PROBE_TOLERANCES[self._config.model.dtype] if tolerance is None else tolerance
            try:
                answers = self._fleet.each(lambda i, engine: engine.probe(token_ids))
                told["max_difference"] = max(check_probe(a, trainer_logp, tolerance).max_difference for a in answers)
            except WeightSyncError as error:
                self._fleet.close(str(error))
                raise
        return told["max_difference"]

    def died(self) -> list[str]:
        """``EngineFleet.died`` since ``connect``; empty on ranks other than 0."""
        return self._fleet.died()

    def watch(self, version: WeightsVersion) -> EngineWatch:
        """Watch the engines, which have this version, on rank 0; none on others."""
        return self._fleet.watch(str(version)) if self._rank == 0 else EngineWatch([], str(version))

    @cached_property
    def _bytes(self) -> int:
        return bytes_of(self._plan.destination, self._dtype)

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

    def _init_info(self, replica: int, places: Places | None = None) -> dict[str, Any]:
        """``megarl.run.sync.receiver.InitInfo`` for one engine."""
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


def _engine_layout(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> Layout:
    """Layout of all engines' workers."""
    return vllm_layout(
        hf_config, rollout.tp, replicas=rollout.replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel
    )
