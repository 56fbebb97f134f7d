"""Fork servers: processes that have imported torch, and vLLM or Megatron, from which a job's processes are forked.

The command imports what it needs itself and forks them, so that they import the rest while it checks the job
(``core/processes/fork.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from megarl.core.jobs import ProcessKind
from megarl.core.processes.collector import uncollected
from megarl.core.processes.fork import ForkRoot, ForkServer, loaded_with

COMMON = ("torch", "torch._dynamo", "torch._inductor.standalone_compile", "torch._inductor.lowering")
"""Modules that vLLM and Megatron-Core both import."""
PRELOAD: Mapping[ProcessKind, tuple[str, ...]] = {
    ProcessKind.TRAINER: (
        "megarl.train.trainer",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.transformer.multi_latent_attention",
        "transformers.modeling_gguf_pytorch_utils",
        "pyarrow.parquet",
    ),
    ProcessKind.EXPLORER: ("megarl.explore.explorer.explorer",),
    ProcessKind.ENGINE: (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.cli.serve",
        "megarl.engines.sync.receiver",
        "model_hosting_container_standards.sagemaker",
        "vllm.distributed.device_communicators.cpu_communicator",
        "vllm.entrypoints.openai.models.api_router",
        "vllm.entrypoints.rl.factories",
        "vllm.entrypoints.serve.instrumentator.metrics",
        "vllm.entrypoints.serve.lora.api_router",
        "vllm.entrypoints.serve.profile.api_router",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.renderers.hf",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine.async_llm",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
    ),
}
"""Modules that a process of a kind needs, those that it would import late among them."""


class ForkServers:
    """Fork servers of a command on this machine, one for each kind of processes.

    Args:
        threads: ``OMP_NUM_THREADS`` of the processes to come. OpenMP reads it with torch's import: each number has
            imports of its own.
        modules: What this process imports, before it forks them where they all have one number: what they need of it
            they have then. Imports of these must read none of the variables that processes to come have of their own.
    """

    def __init__(self, threads: Sequence[int], modules: Sequence[str] = ()) -> None:
        numbers = list(dict.fromkeys(threads))
        if len(numbers) == 1:
            _import_with(numbers[0], modules)
        self._roots = {
            number: ForkRoot(COMMON, {"OMP_NUM_THREADS": str(number)}) for number in numbers if _may_load(number)
        }
        self._servers: dict[ProcessKind, ForkServer] = {}

    def preload(self, kind: ProcessKind, environment: Mapping[str, str]) -> None:
        """Import what processes of a kind need, with variables that its imports may read. Repeating does nothing: the
        jobs of a command are alike."""
        root = self._roots.get(int(environment["OMP_NUM_THREADS"]))
        if kind in self._servers or root is None:
            return
        if (server := root.server(PRELOAD[kind], {**os.environ, **environment})) is not None:
            self._servers[kind] = server

    def of(self, kind: ProcessKind | None) -> ForkServer | None:
        """Return the server for a kind, if there is one."""
        return None if kind is None else self._servers.get(kind)

    def close(self) -> None:
        """End the servers; what they have forked goes on."""
        for root in self._roots.values():
            root.close()
        for server in self._servers.values():
            server.close()
        self._roots, self._servers = {}, {}


def _import_with(threads: int, modules: Sequence[str]) -> None:
    """Import modules with ``OMP_NUM_THREADS``, unless torch was imported with another number."""
    if not _may_load(threads):
        return
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with uncollected():
            for name in modules:
                import_module(name)
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    if "torch" in sys.modules:
        loaded_with[:] = [str(threads)]


def _may_load(threads: int) -> bool:
    """Return False where OpenMP has read another number of threads already."""
    return "torch" not in sys.modules or loaded_with == [str(threads)]
