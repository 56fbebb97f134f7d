"""Entry point of vLLM's ``vllm.general_plugins``: registers our weight receiver in every process of an engine."""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

from megarl.core.imports import do_without_videos
from megarl.core.processes import gloo_device, heartbeat
from megarl.core.processes.machine import end_after_parent
from megarl.core.processes.secrets import hide_secrets
from megarl.engines.client.names import ADAPTERS, CPU_ROUTING

BACKEND = "megarl"


def register() -> None:
    """Register the weight-transfer backend ``megarl``; vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # register_engine raises on a second call and has no query.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.engines.sync.receiver", "Receiver")
    hide_secrets()
    do_without_videos()
    if heartbeat.listen() is not None:  # set by a supervisor
        end_after_parent()
    gloo_device.share()
    _fork_on_cpu()
    wait_for_calls()
    if os.environ.get(CPU_ROUTING):
        from megarl.engines.cpu.routing import install

        install()
    if os.environ.get(ADAPTERS):
        from megarl.engines.sync import one_adapter

        one_adapter.install()


SPIN_S = 0.001
"""Seconds for which a worker on CPU polls for its next call before it sleeps until woken."""
LOOK_MS = 20
"""Milliseconds between a sleeping worker's checks for a call."""


def wait_for_calls() -> None:
    """Patch the waits for calls of workers in engines with several workers.

    vLLM's workers busy-wait for a second after each call, which on CPU takes cores from other processes of the job. A
    sleeping worker then checks only every 5 s if its wake-up is lost, which happens while the socket's queue of one
    counts as full.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_MS
    start: Any = shm_broadcast.SpinCondition.__init__
    if current_platform.is_cpu() and signature(start).parameters["busy_loop_s"].default != SPIN_S:
        start.__defaults__ = (SPIN_S,)


def _fork_on_cpu() -> None:
    """Let workers be forked on CPU: vLLM starts its engine core and workers in fresh interpreters, to set their OpenMP
    environment. ``engine_process`` has set it for all of them already; forking, as vLLM does elsewhere, saves each the
    8 s and the memory of importing vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
        return
    platform: Any = type(current_platform)
    configure = platform.check_and_update_config
    if getattr(configure, "forks", False):
        return

    def check_and_update_config(vllm_config: Any) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.forks = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)
