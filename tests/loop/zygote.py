"""Starts engine servers, and other programs that need vLLM, by forking a process that has imported vLLM once: an import
costs 6 to 14 s, and each server up to four.

``python -m tests.loop.zygote`` reads one server's ``[argv, environment, log]`` (JSON) a line and answers with its
process id.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.core.jobs import ProcessKind
from megarl.run.process.process import PRELOAD


class Zygote:
    """The process to fork from. ``environment`` is what every server gets; what vLLM reads while it is imported must be
    here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.loop.zygote"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """A server, or another module's ``main``, in a process group of its own; ``argv`` as for ``python -m``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(argv), dict(environment), str(log)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process to fork from is gone"
        return Forked(int(answer), log)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Forked:
    """A server, with the methods of ``megarl.run.process.process.Child`` that tests use."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    def poll(self) -> int | None:
        """None while it runs; its status is not ours to know."""
        return None if Path(f"/proc/{self.pid}").exists() else -1

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll() is not None


def _serve(argv: list[str], environment: dict[str, str], log: str) -> None:
    sys.argv = argv[argv.index("-m") + 1 :]
    module = importlib.import_module(sys.argv[0])
    os.setsid()
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    module.main()


PRELOADED = (
    *PRELOAD[ProcessKind.ENGINE],
    # What a server and its workers import only once they run.
    "compressed_tensors",
    "prometheus_fastapi_instrumentator",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.executor.multiproc_executor",
)


def _run() -> None:
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # modules stay, and take long to walk
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers leave no zombies
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _serve(*json.loads(line))
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    _run()
