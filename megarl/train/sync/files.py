"""Trainer side of ``sync.method=checkpoint``: each version is written to files, which explore programs read and
verify."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megarl.config.schema import Config
from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.core.processes import heartbeat
from megarl.core.published import FOLDER, PublishedWeights, folder_of, remove_old
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import ProbeText
from megarl.learn.training.optimizer import check_written
from megarl.train.sync.publication import SyncReport
from megarl.weights.checkpoint.formats.hf import export_hf
from megarl.weights.checkpoint.training.disk_space import writing
from megarl.weights.reshard.buckets import bytes_of
from megarl.weights.reshard.execute import merge
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import hf_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan


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
