"""Commands forked from a process that has imported, once, all that they and their processes import.

A fork of such a process can patch functions before it becomes the supervisor of a job. Trainer ranks, explorer and
engines are forked from the supervisor, reward workers and the second verifier from these: all have the patches.
``python -m megarl.exam.processes FAULT[+FAULT…] OVERRIDES`` is such a job.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

from megarl.core.jobs import ProcessKind
from megarl.core.processes.fork import ForkServer
from megarl.run.process.process import COMMON, PRELOAD

MODULES = (
    *COMMON,
    *PRELOAD[ProcessKind.TRAINER],
    *PRELOAD[ProcessKind.ENGINE],
    *PRELOAD[ProcessKind.EXPLORER],
    "hydra",
    "matplotlib.backends.backend_agg",
    "megarl.cli",
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
NO_FAULT, AND = "-", "+"


def _forked_alone(fork: Any, server: ForkServer, *args: Any, **kwargs: Any) -> int:
    """Refuse to start a process by itself, where the fault would be missing."""
    pid = fork(server, *args, **kwargs)
    if pid is None:
        raise RuntimeError(f"the exam cannot fork {args[0]}: its variables differ from those of the imports")
    return int(pid)


def main(argv: list[str]) -> None:
    """Install faults, then become ``megarl train``."""
    from megarl.exam.areas import find
    from megarl.exam.fault import wrap

    name, *overrides = argv
    wrap(ForkServer.fork, _forked_alone)
    if name != NO_FAULT:
        for module in MODULES:
            importlib.import_module(module)
        for fault in map(find, name.split(AND)):
            if fault.install is not None:
                fault.install()
    sys.argv = ["megarl", "train", *overrides]
    runpy.run_module("megarl", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
