"""Fork servers: processes that have imported torch, and vLLM or Megatron, from which a job's processes are forked.

The command imports what it needs itself and forks these servers. They import the rest while the command checks the job
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
"""Modules to preload for each kind of process, late imports included."""


class ForkServers:
    """Fork servers of a command on this machine, one for each kind of processes.

    Args:
        threads: ``OMP_NUM_THREADS`` of future processes. OpenMP reads it when torch is imported, so each number needs
            separate imports.
        modules: Imported by this process before forking, if all processes have one thread number; the servers then have
            them already. Their imports must not read variables that differ between the processes.
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
        """Import the modules of a kind of process, with the variables that the imports read. Repeated calls do nothing:
        a command's jobs need the same modules."""
        root = self._roots.get(int(environment["OMP_NUM_THREADS"]))
        if kind in self._servers or root is None:
            return
        if (server := root.server(PRELOAD[kind], {**os.environ, **environment})) is not None:
            self._servers[kind] = server

    def of(self, kind: ProcessKind | None) -> ForkServer | None:
        """Return the server for a kind; None if there is none."""
        return None if kind is None else self._servers.get(kind)

    def close(self) -> None:
        """End the servers; their forked processes go on."""
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
    """Return False if OpenMP has already read another number of threads."""
    return "torch" not in sys.modules or loaded_with == [str(threads)]
