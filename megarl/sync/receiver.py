"""The engine's side of a weight sync, inside vLLM's workers: a WeightTransferEngine and a worker extension."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from megarl.checkpoint.hf import read_hf_config
from megarl.errors import WeightSyncError
from megarl.reshard.execute import digests_of, receive
from megarl.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from megarl.reshard.plan import build_plan
from megarl.sync.link import Link, LinkAddress, join, open_store
from megarl.sync.writer import SliceWriter


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker needs to build the trainer's plan by itself and to join the link. Plain values: it travels as JSON."""

    host: str
    port: int
    generation: int
    world_size: int
    timeout_s: float
    grid: dict[str, int]
    """tp, pp and dp of the trainer."""
    vocab_multiple: int
    replicas: int
    replica: int
    dtype: str
    bucket_bytes: int
    fingerprint: str
    """Of the trainer's plan."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: str


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives slices from trainer ranks and writes them into this worker's local fused tensors."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _link: Link | None = None
    _store: TCPStore | None = None

    def agree(self, info: InitInfo) -> None:
        """Builds the plan and checks that it is the trainer's; apart from joining, so that a difference shows at once.

        Raises:
            WeightSyncError: the plans or the dtypes differ.
        """
        hf_config = read_hf_config(Path(self.model_config.model))
        tp = self.parallel_config.tensor_parallel_size
        grid = MegatronGrid(**info.grid)
        source = megatron_layout(hf_config, grid, vocab_multiple=info.vocab_multiple)
        self._layout = vllm_layout(hf_config, tp, replicas=info.replicas)
        self._plan = build_plan(source, self._layout)
        self._rank = info.replica * tp + self.parallel_config.rank
        self._bucket_bytes = info.bucket_bytes
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        if self._plan.fingerprint != info.fingerprint or dtype != info.dtype:
            raise WeightSyncError(
                f"trainer and engine do not agree on the weights: plan {info.fingerprint[:12]} in {info.dtype} against "
                f"{self._plan.fingerprint[:12]} in {dtype}; both must use the same model directory "
                f"({self.model_config.model}), model.dtype and version of megarl"
            )
        self._writer = SliceWriter(self.model, self.model_config, self._layout.local_shapes(self._rank))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the link; returns when every trainer rank and every worker has."""
        self.agree(init_info)
        self.shutdown()
        address = LinkAddress(
            init_info.host, init_info.port, init_info.generation, init_info.world_size, init_info.timeout_s
        )
        self._store = open_store(address, master=False)
        trainers = self._plan.source.num_ranks
        self._link = join(self._store, address, trainers + self._rank, peers=0)

    def start_weight_update(self) -> None:
        with torch.device(self.device), torch.no_grad():
            self._writer.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._link is not None, "no link: init_weight_transfer_engine comes before update_weights"
        try:
            with torch.device(self.device), torch.no_grad():
                receive(
                    self._plan,
                    self._rank,
                    self._writer.tensor,
                    self._link,
                    dtype=self.model_config.dtype,
                    bucket_bytes=self._bucket_bytes,
                    wrote=self._writer.wrote,
                )
        except BaseException:
            self.shutdown()  # closes the connections: the senders learn at once instead of after their timeout
            raise

    def finish_weight_update(self) -> None:
        with torch.device(self.device), torch.no_grad():
            self._writer.finish()

    def digests(self) -> dict[str, int]:
        """Logical tensor -> digest of this worker's part of it, read back from what the model computes with."""
        with torch.device(self.device), torch.no_grad():
            # One tensor at a time is unpacked; its pieces follow each other.
            return digests_of(self._layout, self._rank, lru_cache(maxsize=1)(self._writer.computed_with))

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._store = None


class WorkerExtension:
    """Methods that vLLM adds to each of its workers; called by name through ``/collective_rpc``."""

    weight_transfer_engine: Receiver
    _weight_update_active: bool

    def megarl_agree(self, info: dict[str, Any]) -> None:
        """``Receiver.agree`` with the fields of an InitInfo."""
        self.weight_transfer_engine.agree(InitInfo(**info))

    def megarl_digests(self) -> dict[str, str]:
        """Logical tensor -> digest in hexadecimal (JSON readers elsewhere lose 64-bit integers)."""
        return {name: f"{digest:016x}" for name, digest in self.weight_transfer_engine.digests().items()}

    def megarl_abandon_update(self) -> dict[str, bool]:
        """Forgets an update that began and will not be finished, so that the next one may start."""
        abandoned = self._weight_update_active
        self._weight_update_active = False
        return {"abandoned": abandoned}
