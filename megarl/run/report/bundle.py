"""``megarl doctor --bundle RUN``: one zip file for diagnosing a failed job elsewhere.

It has logs, settings, metrics, versions and the environment, without weights and store. Logs may contain texts of rows.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from megarl.core.errors import ConfigError, masked_text

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
