"""Commands forked from a process that has imported, once, all that they and their processes import.

A fork of such a process can patch functions before it becomes the supervisor of a job. Trainer ranks, explorer, engines
and reward workers are forked from the supervisor, so the patches are in all of them.
``python -m megarl.exam.processes FAULT OVERRIDES`` is such a job.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from contextlib import suppress
from typing import Any

from megarl.core.jobs import ProcessKind
from megarl.core.processes.fork import ForkServer
from megarl.run.process.process import COMMON, PRELOAD

MODULES = (
    *COMMON,
    *PRELOAD[ProcessKind.TRAINER],
    *PRELOAD[ProcessKind.ENGINE],
    *PRELOAD[ProcessKind.EXPLORER],
    "megarl.learn.models.from_scratch",
    "megarl.run.checks.job",
    "megarl.run.launch.job",
    "megarl.run.report.html",
    "reasoning_gym",
)
"""Modules of all processes of a job."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "megarl",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Variables of engines that vLLM may read while it is imported."""
NO_FAULT = "-"


def _forked_alone(fork: Any, server: ForkServer, *args: Any, **kwargs: Any) -> int:
    """Refuse to start a process by itself, where the fault would be missing."""
    pid = fork(server, *args, **kwargs)
    if pid is None:
        raise RuntimeError(f"the exam cannot fork {args[0]}: its variables differ from those of the imports")
    return int(pid)


def main(argv: list[str]) -> None:
    """Install a fault, then become ``megarl train``."""
    from megarl.exam.areas import find
    from megarl.exam.areas.reward_faults import FAULTS
    from megarl.exam.fault import wrap
    from megarl.rewards.again import SecondVerifier

    name, *overrides = argv
    wrap(ForkServer.fork, _forked_alone)
    if name != NO_FAULT:
        fault = find(name)
        for module in MODULES:
            importlib.import_module(module)
        if fault.install is not None:
            fault.install()
        if fault in FAULTS:
            SecondVerifier.command = ("-m", __spec__.name, VERIFIER, name)
    sys.argv = ["megarl", "train", *overrides]
    runpy.run_module("megarl", run_name="__main__", alter_sys=True)


VERIFIER = "verifier"
"""First argument of the process that gives second verdicts."""


def verifier(name: str, parent: str) -> None:
    """Install a fault of rewards as far as it is in verifiers, then give second verdicts."""
    from megarl.exam.areas import find
    from megarl.rewards import again

    install = find(name).install
    if install is not None:
        with suppress(LookupError):  # it is in a process of another kind
            install()
    again.main([parent])


if __name__ == "__main__":
    verifier(*sys.argv[2:]) if sys.argv[1] == VERIFIER else main(sys.argv[1:])
