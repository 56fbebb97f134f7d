"""The engine's side of a weight sync, inside vLLM's workers: a WeightTransferEngine and a worker extension."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

from megarl import ops
from megarl.config.lora import LoraConfig
from megarl.core.errors import WeightSyncError
from megarl.core.processes.machine import trim_memory
from megarl.engines.client.control import FAILURE
from megarl.engines.sync.draft_layers import DraftLayers
from megarl.engines.sync.eight_bits import EightBits
from megarl.engines.sync.files import compare_with_files, differing_weights, read_files
from megarl.engines.sync.link import Backend, Link, LinkAddress, join_groups, open_store
from megarl.engines.sync.lora import AdaptedWriter, AdapterWriter, Part
from megarl.engines.sync.shared import DeviceMemory, HostMemory, Places, SharedMemoryReceiver, machine
from megarl.engines.sync.sleep import (
    NOT_PUBLISHED,
    WHAT,
    Address,
    Sleeper,
    What,
    addresses_of,
    check_addresses,
    sleeper_of,
)
from megarl.engines.sync.writer import LocalTensor, SliceWriter
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.adapters import AdapterDelivery, is_adapter
from megarl.weights.reshard.buckets import wire_dtype
from megarl.weights.reshard.execute import digests_of, fold, merge, piece_digests, receive, zero_padded
from megarl.weights.reshard.layouts import Layout, MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan

if current_platform.is_cpu():
    # Needed before a worker builds its model.
    import megarl.engines.cpu.local_experts  # noqa: F401
    from megarl.engines.cpu import drafts, single_rows
    from megarl.engines.cpu import router_bias as cpu_router

    drafts.install()
    single_rows.install()
    cpu_router.install()

log = logging.getLogger(__name__)

TRIMMED_BYTES = 2**26
"""Parameters of a worker above which freed memory is returned to the system after an update; reuse costs zeroing it."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Data from which a worker builds the trainer's plan and joins the link. Plain values, for JSON."""

    host: str
    port: int
    name: str
    world_size: int
    timeout_s: float
    grid: dict[str, int | None]
    """Fields of the trainer's MegatronGrid."""
    transformer_impl: Literal["local", "transformer_engine"]
    """Implementation of the trainer's model, which determines local names and slices."""
    vocab_multiple: int
    kernels: Literal["megarl", "torch"]
    """``trainer.kernels``, for the computation of digests."""
    replicas: int
    replica: int
    dtype: str
    weight_dtype: Literal["auto", "fp8"]
    """``rollout.weight_dtype`` of the trainer's program."""
    bucket_bytes: int
    fingerprint: str
    """Fingerprint of the trainer's plan."""
    places: dict[str, Any]
    """Fields of ``megarl.engines.sync.shared.Places``."""
    transport: Backend
    """``sync.transport``: backend of messages between machines."""
    keep_buckets: bool = True
    """Keep the senders' buckets in GPU memory open after an update."""
    lora: dict[str, Any] | None = None
    """Fields of ``model.lora``; None if the model has no adapters."""
    adapter: Literal["merged", "separate"] = "merged"
    """``sync.adapter``."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: str
    folder: str | None = None
    """Folder of the weights' files; None for weights sent over the link."""
    part: Part = "all"
    """Weights of the update: all, or only those that training changes."""


def _delivery(hf_config: Mapping[str, Any], info: InitInfo) -> AdapterDelivery:
    """Return the delivery of the trainer's adapters."""
    return AdapterDelivery.of(hf_config, LoraConfig(**(info.lora or {})), separate=info.adapter == "separate")


def _plans_of(source: Layout, layout: Layout, adapters: AdapterDelivery | None) -> dict[Part, ReshardPlan]:
    """Return the plans of all weights and of the weights that training changes."""
    if adapters is None:
        return {"all": build_plan(source, layout)}
    plan = build_plan(adapters.layout(source), adapters.layout(layout))
    return {"all": plan, "changed": plan.only(adapters.changed(plan.destination).__contains__)}


# vLLM reads several workers' replies in turn and stops after a failed one: the unread replies are then taken as replies
# to its next call. So no worker raises; errors are kept for megarl_outcome, or returned as a reply.


def _kept(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def run(self: Receiver, *args: Any) -> None:
        try:
            step(self, *args)
        except Exception as error:
            log.exception("%s failed", step.__name__)
            self.failure = str(error) or type(error).__name__

    return run


def _answered(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(method)
    def run(self: WorkerExtension, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            return {FAILURE: str(error) or type(error).__name__}

    return run


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives slices from trainer ranks and writes them into this worker's local fused tensors."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    writer: SliceWriter | None = None
    """Writer of this worker's model; None before ``agree``."""
    adapted: AdaptedWriter | None = None
    """``writer`` for a trainer's model with adapters, including the engine's separate adapters."""
    drafter: torch.nn.Module | None = None
    """vLLM's draft model, if it has one."""
    _draft_layers: DraftLayers | None = None
    _agreed: str | None = None
    """Fingerprint of the plan that ``agree`` built."""
    _links: Sequence[Link] = ()
    """Links of notices and of bucket messages; may be the same."""
    _receiver: SharedMemoryReceiver | None = None
    failure: str | None = None
    """Failure of the last step, until reported."""
    sleeper: Sleeper | None = None
    """None until the worker sleeps for the first time."""
    _lost: bool = False
    """True from a sleep that frees the weights to the next whole update."""
    addresses: dict[str, Address] | None = None
    """Addresses of the model's tensors since the first update; None after a wake that may have moved them."""

    def agree(self, info: InitInfo) -> None:
        """Build the plan and check that it equals the trainer's; separate from joining, to report a difference early.

        Raises:
            WeightSyncError: the plans or the dtypes differ.
        """
        ops.use(info.kernels)
        hf_config = read_hf_config(Path(self.model_config.model))
        mine = self.parallel_config
        source = megatron_layout(
            hf_config,
            MegatronGrid(**info.grid),  # type: ignore[arg-type]  # JSON: each field is what it was
            vocab_multiple=info.vocab_multiple,
            transformer_impl=info.transformer_impl,
        )
        layout = vllm_layout(
            hf_config,
            mine.tensor_parallel_size,
            replicas=info.replicas,
            pp=mine.pipeline_parallel_size,
            expert_parallel=mine.enable_expert_parallel,
        )
        plans = _plans_of(source, layout, None if info.lora is None else _delivery(hf_config, info))
        plan = plans["all"]
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        if plan.fingerprint != info.fingerprint or dtype != info.dtype:
            raise WeightSyncError(
                f"trainer and engine do not agree on the weights: plan {info.fingerprint[:12]} in {info.dtype} against "
                f"{plan.fingerprint[:12]} in {dtype}; both must use the same model directory "
                f"({self.model_config.model}), model.dtype and version of megarl"
            )
        held = "auto" if self.model_config.quantization is None else "fp8"
        if held != info.weight_dtype:
            raise WeightSyncError(
                f"the trainer has rollout.weight_dtype={info.weight_dtype}, the engine was started with {held}: the "
                "programs that share engines need the same"
            )
        rank = info.replica * mine.tensor_parallel_size * mine.pipeline_parallel_size + mine.rank
        self.writer = self._writer_of(layout, rank)
        self.plans = plans
        self.adapted = None if info.lora is None else self._adapted_of(self.writer, plans, rank)
        if info.adapter != "separate" and hasattr(self.model, "lora_manager"):
            raise WeightSyncError(
                "the engine was started with sync.adapter=separate, the trainer sends no adapters: the programs that "
                "share engines need the same sync.adapter and model.lora"
            )
        if self.drafter is not None:
            self._draft_layers = self._draft_layers or self._draft_layers_of(self.drafter, hf_config)
        self._layout, self._rank, self._bucket_bytes = layout, rank, info.bucket_bytes
        self._agreed = info.fingerprint

    def _draft_layers_of(self, drafter: torch.nn.Module, hf_config: Mapping[str, Any]) -> DraftLayers:
        mine = self.parallel_config
        layout = vllm_layout(
            hf_config, mine.tensor_parallel_size, expert_parallel=mine.enable_expert_parallel, drafts=True
        )
        tensors = self._local_tensors(layout, mine.rank)
        return DraftLayers(drafter, self.model, self.model_config, layout, tensors, mine.rank)

    def _local_tensors(self, layout: Layout, rank: int) -> dict[str, LocalTensor]:
        dtype = self.model_config.dtype
        return {
            row.local: LocalTensor(row.local_shape(share), wire_dtype(layout, row.parts[0], dtype))
            for row, share in layout.rows_of(rank)
        }

    def _writer_of(self, layout: Layout, rank: int) -> SliceWriter:
        tensors = self._local_tensors(layout, rank)
        eight_bits = EightBits(self.model, layout, rank)
        if (self.model_config.quantization is not None) != bool(eight_bits):
            raise WeightSyncError(
                f"vLLM was told to keep weights as {self.model_config.quantization}, and keeps {len(eight_bits)} "
                "layers in 8 bits by channels or blocks: this vLLM version quantises otherwise"
            )
        return SliceWriter(self.model, self.model_config, tensors, eight_bits)

    def _adapted_of(self, writer: SliceWriter, plans: Mapping[Part, ReshardPlan], rank: int) -> AdaptedWriter:
        """Return the writer of a model trained with adapters."""
        rows = [row for row in plans["all"].destination.rows if is_adapter(row.local)]
        own = AdapterWriter(self.model, plans["all"].destination.only_rows(rows), rank) if rows else None
        changed = [local for local in plans["changed"].destination.local_shapes(rank) if not is_adapter(local)]
        return AdaptedWriter(writer, own, changed)

    @_kept
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the engine's link; return when every trainer rank and worker of the engine has joined."""
        self.shutdown()
        assert self._agreed == init_info.fingerprint, (
            "another plan: megarl_agree comes before init_weight_transfer_engine"
        )
        address = LinkAddress(init_info.host, init_info.port, init_info.name, init_info.world_size, init_info.timeout_s)
        store = open_store(address, master=False)  # closed on return, or trainer rank 0 would need a socket per worker
        places = Places(**init_info.places)
        self.plans = {part: replace(plan, nearness=places.nearness()) for part, plan in self.plans.items()}
        plan = self.plans["all"]
        rank = plan.source.num_ranks + self.parallel_config.rank
        senders, over = plan.senders_to(self._rank), init_info.transport
        files = places.senders_on_same_machine(self._rank) if places.workers else {}
        near, far = ([sender for sender in senders if (sender in files) == is_near] for is_near in (True, False))
        self._links = join_groups(store, address, rank, peers=0, near=near, far=far, over=over)
        memory = DeviceMemory(keeps=init_info.keep_buckets) if over == "nccl" else HostMemory(others=files)
        self._receiver = SharedMemoryReceiver(self._links[0], files, memory, self._links[1])

    @_kept
    def start_weight_update(self) -> None:
        self._require_weights("start_weight_update")
        assert self.writer is not None, "no trainer: megarl_agree comes before start_weight_update"
        if self.addresses is None:
            self.addresses = addresses_of(self.model)
        if self.adapted is None:  # else started with the weights, which name their part
            with torch.device(self.device), torch.no_grad():
                self.writer.start()

    @_kept
    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._require_weights("update_weights")
        assert self.writer is not None
        if update_info.folder is not None:
            with torch.device(self.device), torch.no_grad():
                place, dtype = Path(update_info.folder), self.model_config.dtype
                read_files(self._layout, self._rank, self.writer.tensor, self.writer.wrote, place, dtype)
            return
        assert self._receiver is not None, "no link: init_weight_transfer_engine comes before update_weights"
        part, writer = update_info.part, self.adapted or self.writer
        if part not in self.plans:
            raise WeightSyncError(
                "an update of what training changes came from a trainer that has announced no model.lora; join again"
            )
        try:
            with torch.device(self.device), torch.no_grad():
                if self.adapted is not None:
                    self.adapted.start(part)
                receive(
                    self.plans[part],
                    self._rank,
                    writer.tensor,
                    self._receiver,
                    dtype=self.model_config.dtype,
                    bucket_bytes=self._bucket_bytes,
                    wrote=writer.wrote,
                )
                self._receiver.finish()
        except BaseException:
            self.shutdown()  # closes the connections, so that senders fail at once instead of after their timeout
            raise

    @_kept
    def finish_weight_update(self) -> None:
        self._require_weights("finish_weight_update")
        assert self.writer is not None
        with torch.device(self.device), torch.no_grad():
            (self.adapted or self.writer).finish()
        self._lost = False
        if sum(parameter.nbytes for parameter in self.model.parameters()) > TRIMMED_BYTES:
            trim_memory()  # unpacked layers and buckets: 250 MiB in an engine with 100M parameters
        assert self.addresses is not None, "start_weight_update comes before finish_weight_update"
        check_addresses(self.addresses, addresses_of(self.model))

    def digests(self) -> dict[str, int]:
        """Return logical tensor -> digest of this worker's part, read back from the model's weights, or as arrived for
        8-bit weights. Raises WeightsDiffer if padding is not zero, an 8-bit form does not match the arrived weights, or
        draft layers are not those of the model's files."""
        self._require_values("megarl_digests")
        assert self.writer is not None, "no trainer: megarl_agree comes before megarl_digests"
        eight_bits = self.writer.eight_bits
        layout, writer = eight_bits.rest, self.adapted or self.writer
        if self.adapted is not None:
            layout = self.adapted.layout(layout, self.plans["changed"].destination)
        with torch.device(self.device), torch.no_grad():
            if self._draft_layers is not None:
                self._draft_layers.check()
            read, check_rest = zero_padded(layout, self._rank, writer.computed_with)
            found = digests_of(layout, self._rank, read)
            check_rest()
            if self.adapted is not None:
                changed = self.plans["changed"].destination
                own, rank = eight_bits.rest, self._rank
                self.adapted.check_still(
                    found, lambda still: digests_of(still, rank, writer.computed_with), own, changed
                )
            return merge([found, *({tensor: digest} for tensor, _, digest in eight_bits.pieces())])

    def check_files(self) -> int:
        """Compare the model's weights with the files that it was loaded from; return the number of elements. No trainer
        is needed. Raises WeightsDiffer."""
        self._require_values("megarl_check_files")
        _, writer = self._alone()
        read = lru_cache(maxsize=1)(writer.computed_with)  # consecutive pieces share a tensor
        path, rank, dtype = Path(self.model_config.model), self.parallel_config.rank, self.model_config.dtype
        with torch.device(self.device), torch.no_grad():
            count = writer.eight_bits.check_files(path, dtype)
            return count + compare_with_files(writer.eight_bits.rest, rank, read, path, dtype)

    def differing_weights(self, path: Path) -> dict[str, str]:
        """Return ``files.differing_weights`` from the checkpoint at ``path``, without weights in 8 bits."""
        self._require_values("differing_weights")
        _, writer = self._alone()
        read = lru_cache(maxsize=1)(writer.computed_with)
        with torch.device(self.device), torch.no_grad():
            rest, rank = writer.eight_bits.rest, self.parallel_config.rank
            return differing_weights(rest, rank, read, path, self.model_config.dtype)

    def expect_files(self) -> None:
        """Prepare for updates from files, which need no trainer."""
        self._layout, self.writer = self._alone()
        self.adapted = None  # the files have merged weights; the adapter is zero
        self._rank = self.parallel_config.rank

    def piece_digests(self) -> list[tuple[str, boxes.Box, int]]:
        """Return ``execute.piece_digests`` of this worker."""
        self._require_values("megarl_piece_digests")
        assert self.writer is not None, "megarl_expect_files comes before megarl_piece_digests"
        with torch.device(self.device), torch.no_grad():
            eight_bits = self.writer.eight_bits
            return piece_digests(eight_bits.rest, self._rank, self.writer.computed_with) + eight_bits.pieces()

    def _alone(self) -> tuple[Layout, SliceWriter]:
        """Return the layout of this single engine, and a writer of this worker's part."""
        mine = self.parallel_config
        layout = vllm_layout(
            read_hf_config(Path(self.model_config.model)),
            mine.tensor_parallel_size,
            pp=mine.pipeline_parallel_size,
            expert_parallel=mine.enable_expert_parallel,
        )
        return layout, self._writer_of(layout, mine.rank)

    def lose_weights(self) -> None:
        """Require all weights in the next update, because they are freed."""
        self._lost = True
        if self.adapted is not None:
            self.adapted.has_own = False

    def _require_weights(self, step: str) -> None:
        """Raise WeightSyncError while the weights sleep."""
        if self.sleeper is not None and "weights" in self.sleeper.asleep:
            raise WeightSyncError(f"the engine's weights are asleep: megarl_wake('weights') comes before {step}")

    def _require_values(self, step: str) -> None:
        """Raise WeightSyncError while the weights sleep, or have no values since."""
        self._require_weights(step)
        if self._lost:  # their memory has what was there before: zeros, or anything else
            raise WeightSyncError(f"{NOT_PUBLISHED}: one comes before {step}")

    def shutdown(self) -> None:
        for link in self._links:
            link.close()
        if self._receiver is not None:
            self._receiver.close()
        self._links, self._receiver = (), None


class WorkerExtension:
    """Methods that vLLM adds to each of its workers; called by name through ``/collective_rpc``. Failures are returned
    as replies."""

    weight_transfer_engine: Receiver
    get_draft_model: Callable[[], torch.nn.Module | None]
    _weight_update_active: bool

    @_answered
    def megarl_agree(self, info: dict[str, Any]) -> dict[str, str]:
        """Call ``Receiver.agree`` with the fields of an InitInfo; return this worker's machine."""
        self.weight_transfer_engine.drafter = self.get_draft_model()
        self.weight_transfer_engine.agree(InitInfo(**info))
        return {"machine": machine()}

    @_answered
    def megarl_digests(self) -> dict[str, str]:
        """Return logical tensor -> digest in hexadecimal (some JSON readers lose 64-bit integers)."""
        return {name: f"{digest:016x}" for name, digest in self.weight_transfer_engine.digests().items()}

    @_answered
    def megarl_digest_fold(self) -> dict[str, Any]:
        """Return the ``fold`` of the digests in hexadecimal and its number of ``tensors``, which a sync compares
        first."""
        found = self.weight_transfer_engine.digests()
        return {"fold": f"{fold(found):016x}", "tensors": len(found)}

    @_answered
    def megarl_check_files(self) -> dict[str, int]:
        """Return the number of ``elements`` equal to the model's files; a failure names the differing tensors."""
        return {"elements": self.weight_transfer_engine.check_files()}

    @_answered
    def megarl_expect_files(self) -> dict[str, bool]:
        """Call ``Receiver.expect_files``, so that updates may name a folder."""
        self.weight_transfer_engine.expect_files()
        return {"ready": True}

    @_answered
    def megarl_piece_digests(self) -> dict[str, list[Any]]:
        """Return ``pieces``: [logical tensor, [[from, to] of each axis], digest in hexadecimal] of each piece of the
        worker."""
        found = self.weight_transfer_engine.piece_digests()
        return {"pieces": [(tensor, box, f"{digest:016x}") for tensor, box, digest in found]}

    @_answered
    def megarl_outcome(self) -> dict[str, Any]:
        """Return the outcome of vLLM's last step (init, start, update, finish)."""
        failure, self.weight_transfer_engine.failure = self.weight_transfer_engine.failure, None
        if failure is not None:
            raise WeightSyncError(failure)
        return {}

    def megarl_abandon_update(self) -> dict[str, bool]:
        """Cancel an unfinished update, so that the next one may start."""
        abandoned = self._weight_update_active
        self._weight_update_active = False
        self.weight_transfer_engine.failure = None
        return {"abandoned": abandoned}

    @_answered
    def megarl_sleep(self, keep_weights: bool = False) -> dict[str, int]:
        """Free KV cache and weights (``Sleeper.sleep``), also before a trainer joins."""
        if self._weight_update_active:
            raise WeightSyncError("a weight update is under way: it ends, or is abandoned, before megarl_sleep")
        if not keep_weights:
            self.weight_transfer_engine.lose_weights()
        return self._sleeper().sleep(keep_weights)

    @_answered
    def megarl_wake(self, what: What) -> dict[str, int]:
        """Allocate the memory of ``what`` again (``Sleeper.wake``)."""
        if what not in WHAT:
            raise WeightSyncError(f"megarl_wake takes one of {', '.join(WHAT)}, not {what!r}")
        sleeper = self._sleeper()
        if what in sleeper.asleep and sleeper.moves:
            self.weight_transfer_engine.addresses = None
        return sleeper.wake(what)

    def _sleeper(self) -> Sleeper:
        receiver = self.weight_transfer_engine
        receiver.sleeper = receiver.sleeper or sleeper_of(self)
        return receiver.sleeper
