"""Fork servers: processes that have imported torch, and vLLM or Megatron, from which a job's processes are forked.

The command forks them before it imports anything itself, so that they import while it checks the job
(``core/fork.py``).
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from megarl.core.fork import MESSAGE_BYTES, ForkServer, ignore_ends, loaded_with, serve
from megarl.core.jobs import ProcessKind
from megarl.core.parent import die_with

COMMON = ("torch", "torch._dynamo", "torch._inductor.standalone_compile", "torch._inductor.lowering")
"""Modules that vLLM and Megatron-Core both import."""
PRELOAD: Mapping[ProcessKind, tuple[str, ...]] = {
    ProcessKind.TRAINER: (
        "megarl.train.loop.trainer",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "transformers.modeling_gguf_pytorch_utils",
        "pyarrow.parquet",
    ),
    ProcessKind.EXPLORER: ("megarl.explore.explorer.explorer",),
    ProcessKind.ENGINE: (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.cli.serve",
        "megarl.engine.sync.receiver",
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
    """

    def __init__(self, threads: Sequence[int]) -> None:
        self._roots = {number: _root(number) for number in dict.fromkeys(threads) if _may_load(number)}
        self._servers: dict[ProcessKind, ForkServer] = {}

    def preload(self, kind: ProcessKind, environment: Mapping[str, str]) -> None:
        """Import what processes of a kind need, with variables that its imports may read. Repeating does nothing: the
        jobs of a command are alike."""
        if kind in self._servers:
            return
        root = self._roots.get(int(environment["OMP_NUM_THREADS"]))
        if root is None:
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        whole = {**os.environ, **environment}
        with there, suppress(OSError):
            socket.send_fds(root, [json.dumps([PRELOAD[kind], whole]).encode()], [there.fileno()])
            self._servers[kind] = ForkServer(here, whole)

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


def _may_load(threads: int) -> bool:
    """Return False where OpenMP has read another number of threads already."""
    return "torch" not in sys.modules or loaded_with == [str(threads)]


def _root(threads: int) -> socket.socket:
    """Fork a process that imports ``COMMON`` and then waits for kinds; it ends with this process or its socket."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if os.fork() == 0:
        here.close()
        _serve_as(parent, partial(_serve_kinds, there, threads))
    there.close()
    return here


def _serve_as(parent: int, serve: Callable[[], None]) -> NoReturn:
    """Run a server in a forked process, silently: who cannot fork from it finds the error in a start of its own."""
    status = 1
    with suppress(BaseException):
        die_with(parent, signal.SIGKILL)
        ignore_ends()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        for handler in list(logging.root.handlers):
            logging.root.removeHandler(handler)
        logging.root.setLevel(logging.WARNING)
        serve()
        status = 0
    os._exit(status)


def _serve_kinds(requests: socket.socket, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    gc.disable()
    for name in COMMON:
        importlib.import_module(name)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        if not message:
            return
        modules, environment = json.loads(message)
        own, parent = socket.socket(fileno=descriptors[0]), os.getpid()
        if os.fork() == 0:
            requests.close()
            _serve_as(parent, partial(serve, own, modules, environment))
        own.close()
