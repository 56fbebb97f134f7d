"""One child process of a job, the fork servers that start it, and its liveness.

The command imports what it needs itself and forks these servers. They import the rest while the command checks the job
(``core/processes/fork.py``).

vLLM's ``/health`` is answered by the HTTP server, even if the core waits forever for a worker. The core's answer may
take as long as one of its steps.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from megarl.core.errors import EngineError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.processes import heartbeat
from megarl.core.processes.fork import Forked, ForkRoot, ForkServer, loaded_with
from megarl.core.processes.machine import die_with, kill_group, uncollected
from megarl.engines.client.control import EngineControl
from megarl.run.process.stacks import STOPPED, ProcessHeartbeat, group_state, state_of

COMMON = ("torch", "torch._dynamo", "torch._inductor.standalone_compile", "torch._inductor.lowering")
"""Modules that vLLM and Megatron-Core both import."""
PRELOAD: Mapping[ProcessKind, tuple[str, ...]] = {
    ProcessKind.TRAINER: (
        "megarl.train.trainer",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.transformer.multi_latent_attention",
        "megarl.learn.models.attention",
        "megarl.learn.models.packed",
        "megarl.learn.models.routing_replay",
        "megarl.learn.models.vision",
        "torch.utils.serialization",
        "transformers.modeling_gguf_pytorch_utils",
        "pyarrow.parquet",
    ),
    ProcessKind.EXPLORER: ("megarl.explore.explorer.explorer",),
    ProcessKind.ENGINE: (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.cli.serve",
        "megarl.engines.sync.receiver",
        "megarl.engines.server.endpoint",
        "anyio._backends._asyncio",
        "uvicorn.protocols.http.auto",
        "uvicorn.protocols.websockets.auto",
        "model_hosting_container_standards.sagemaker",
        "vllm.distributed.device_communicators.cpu_communicator",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.entrypoints.anthropic.api_router",
        "vllm.entrypoints.cohere.api_router",
        "vllm.entrypoints.generate.generative_scoring.api_router",
        "vllm.entrypoints.generate.structured_decisions.api_router",
        "vllm.entrypoints.openai.chat_completion.api_router",
        "vllm.entrypoints.openai.completion.api_router",
        "vllm.entrypoints.openai.models.api_router",
        "vllm.entrypoints.openai.responses.api_router",
        "vllm.entrypoints.rl.factories",
        "vllm.entrypoints.rl.online.api_router",
        "vllm.entrypoints.scale_out.derender.api_router",
        "vllm.entrypoints.scale_out.render.api_router",
        "vllm.entrypoints.scale_out.token_in_token_out.api_router",
        "vllm.entrypoints.serve.dev.cache.api_router",
        "vllm.entrypoints.serve.dev.server_info.api_router",
        "vllm.entrypoints.serve.dev.sleep.api_router",
        "vllm.entrypoints.serve.elastic_ep.api_router",
        "vllm.entrypoints.serve.instrumentator.metrics",
        "vllm.entrypoints.serve.instrumentator.offline_docs",
        "vllm.entrypoints.serve.lora.api_router",
        "vllm.entrypoints.serve.profile.api_router",
        "vllm.entrypoints.serve.tokenize.api_router",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.renderers.hf",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine.async_llm",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "megarl.engines.cpu.registered_kernels",
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


log = logging.getLogger(__name__)

EVERY_S = 1.0
ANSWER_S = 600.0
"""Timeout in seconds of one request. A pending request does not count as progress; the watchdog's timeout is less."""


class Probe:
    """Probes an engine every second until ``alive`` returns False.

    Args:
        url: "" for an engine's part without a server: only the states of its processes are checked.
    """

    def __init__(self, url: str, key: str, group: int, alive: Callable[[], bool]) -> None:
        self.count = 0
        """Number of successful probes."""
        self._url = url
        self._engine = EngineControl(url, key) if url else None
        self._group = group
        self._alive = alive
        threading.Thread(target=self._run, daemon=True, name=f"probe of {url or group}").start()

    @property
    def state(self) -> str:
        """Linux process state of the group's leader; T if any process of the group is stopped."""
        return group_state(self._group)

    def _run(self) -> None:
        while self._alive():
            try:
                if self.state != STOPPED and self._answers():
                    self.count += 1
            except (
                OSError
            ) as error:  # e.g. no free descriptor: this thread must go on, or the engine would count as stalled
                log.warning("the engine at %s cannot be looked at: %s", self._url or "another node's server", error)
            time.sleep(EVERY_S)

    def _answers(self) -> bool:
        if self._engine is None:
            return True
        try:
            self._engine.state(ANSWER_S)
        except EngineError:
            return False
        return True


TAIL_BYTES = 65536
TAIL_LINES = 20
ECHO_S = 0.1
ERROR = re.compile(r"(^|\s)[\w.]*(Error|Exception): \S")
"""The last line of a traceback, after any prefix of a logger."""


class Child:
    """A running process that prints into ``log``, and with ``echo`` also on this terminal.

    The process has the log file open, not a pipe to us, so it can print after we have ended. The descriptors ``keep``
    stay open in it. ``memory`` has the heartbeat of a megarl process. The process is forked from ``servers`` if they
    have a server for its kind.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        echo: bool = False,
        keep: Sequence[int] = (),
        servers: ForkServers | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.segments: set[Path] = set()
        """Shared memory segments that the process is known to have made, for ``Node.note``."""
        self.folder: Path | None = None
        """Temporary folder of the process, removed after its end."""
        self.memory = heartbeat.Memory()
        self.probe: Probe | None = None
        """Probe of an engine, which has no heartbeat of its own."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self.process = self._start_process(argv, {**os.environ, **env}, output.fileno(), keep, servers)
            """Handle of the process: forked by a fork server, or started here."""
        self._echo = threading.Thread(target=self._show, daemon=True) if echo else None
        if self._echo is not None:
            self._echo.start()

    def _start_process(
        self, argv: Sequence[str], env: Mapping[str, str], output: int, keep: Sequence[int], servers: ForkServers | None
    ) -> subprocess.Popen[bytes] | Forked:
        memory = self.memory.descriptor
        server = servers and servers.of(kind_of(self.name))
        if server and argv[0] == sys.executable:
            pid = server.fork(argv[1:], env, output, {heartbeat.VARIABLE: memory}, keep)
            if pid is not None:
                return Forked(pid)
        return subprocess.Popen(
            list(argv),
            env={**env, heartbeat.VARIABLE: str(memory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            pass_fds=[*keep, memory],
        )

    def _show(self) -> None:
        with self.log.open("rb", buffering=0) as log:
            log.seek(self._start)
            while True:
                ended = self.poll() is not None  # before reading, so that the last output is read below
                # Raw chunks, not lines: a progress bar redraws its line with carriage returns.
                while chunk := log.read(TAIL_BYTES):
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                if ended:
                    return
                time.sleep(ECHO_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self.process.poll()

    def tail(self) -> str:
        """Return the log's last lines; before them the first recent exception, if more output has followed it."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError as error:
            return f"(its log is gone: {error.strerror})"
        first = next((i for i, line in enumerate(lines) if ERROR.search(line)), len(lines))
        cause = [lines[first], "..."] if first < len(lines) - TAIL_LINES else []
        return "\n".join([*cause, *lines[-TAIL_LINES:]]) or "(it printed nothing)"

    def last_output_at(self) -> float:
        """Return the time of the last output, in Unix seconds; now, if the log is gone."""
        try:
            return self.log.stat().st_mtime
        except OSError:
            return time.time()

    def heartbeat(self) -> ProcessHeartbeat:
        """Return the process's current heartbeat."""
        if self.probe is not None:
            return ProcessHeartbeat(
                self.probe.count, 0, 0, 0.0, "serving" if self.probe.count else heartbeat.START, self.probe.state
            )
        found = self.memory.read()
        return ProcessHeartbeat(found.beats, found.work, found.step, found.timeout_s, found.phase, state_of(self.pid))

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; SIGKILL goes to its whole group."""
        try:
            if number == signal.SIGKILL:
                kill_group(self.pid)
            elif self.poll() is None:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Return True if the process ended within ``timeout_s``; its output has then been shown."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._echo is not None:
            self._echo.join(timeout=2)
        return True
