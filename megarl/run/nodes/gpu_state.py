"""State of a node's GPUs and fabric (nvidia-smi, /sys/class/infiniband), and the faults in it.

The code for several GPUs and a fabric follows the documentation; it has never run on such a machine.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

QUERY = (
    "name", "compute_cap", "memory.total", "clocks.max.sm", "clocks.sm", "pstate", "clocks_throttle_reasons.active",
    "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending",
)  # fmt: skip
"""Fields of ``nvidia-smi --help-query-gpu``; fields that a driver does not support are left out."""
SAME = {"name": "", "memory.total": " MiB", "clocks.max.sm": " MHz"}
"""Properties that all GPUs of a job must share -> their units."""
HARDWARE_SLOWDOWN = {0x8: "HW slowdown", 0x40: "HW thermal slowdown", 0x80: "HW power brake"}
"""Bits of nvml.h's nvmlClocksThrottleReason… that at least halve the clocks. Idle, power caps and set clocks are
normal."""
UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')
ANSWER_S = 60.0
"""Timeout in seconds: nvidia-smi is slow if the driver is not kept loaded, and hangs with a hung GPU."""
INFINIBAND = Path("/sys/class/infiniband")
DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICE_FILES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(env: Mapping[str, str] = os.environ, driver: Path = DRIVER, device_files: Path = DEVICE_FILES) -> list[str]:
    """Return this node's GPUs that the job may use, by their names in CUDA_VISIBLE_DEVICES; all GPUs if that is not
    set. Containers and virtual machines may hide the driver's folder; device files always exist."""
    if VISIBLE in env:
        words = [word.strip() for word in env[VISIBLE].split(",")]
        return words[: next((i for i, word in enumerate(words) if word in ("", "-1")), len(words))]  # like CUDA
    return [str(number) for number in range(len(list(driver.glob("*")) or list(device_files.glob("nvidia[0-9]*"))))]


def gpus() -> list[dict[str, str]]:
    """Return the ``QUERY`` values of each GPU; [] without nvidia-smi, or if it fails, which is logged."""
    fields = list(QUERY)
    while fields:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except FileNotFoundError:
            return []
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("the GPUs cannot be asked: %s", error)
            return []
        if done.returncode == 0:
            return parse_gpus(done.stdout, fields)
        unknown = UNKNOWN_FIELD.search(done.stdout + done.stderr)
        if unknown is None or unknown[1] not in fields:
            log.warning("the GPUs cannot be asked: %s", (done.stderr or done.stdout).strip())
            return []
        fields.remove(unknown[1])
    return []


def parse_gpus(text: str, fields: Sequence[str] = QUERY) -> list[dict[str, str]]:
    """Parse lines of ``--format=csv,noheader,nounits``; unknown values ("[N/A]", "[Not Supported]") are left out."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        {field: word for field, word in zip(fields, row, strict=True) if not word.startswith(("[", "N/A"))}
        for row in rows
        if len(row) == len(fields)
    ]


def newest_capability(devices: Sequence[Mapping[str, str]]) -> float | None:
    """Return the highest compute capability of some GPUs; None if none is known."""
    found = [gpu["compute_cap"] for gpu in devices if re.fullmatch(r"\d+\.\d", gpu.get("compute_cap", ""))]
    return max(map(float, found), default=None)


def fabric(folder: Path = INFINIBAND) -> dict[str, str]:
    """Return ``mlx5_0/1`` -> ``ACTIVE, 400 Gb/sec (4X NDR)`` for each port with readable state and rate; {} without a
    fabric."""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
            found[f"{port.parents[1].name}/{port.name}"] = f"{state.partition(':')[2].strip() or state}, {rate}"
    return found


def faults(devices: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the faults of each GPU of a node, without comparing nodes."""
    found = []
    for number, gpu in enumerate(devices):
        errors = gpu.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isascii() and errors.isdecimal() and int(errors):
            found.append(f"GPU {number} had {errors} uncorrected ECC errors since its driver was loaded; reset it")
        if gpu.get("remapped_rows.pending", "No") not in ("No", "0"):
            found.append(f"GPU {number} has rows of memory to be remapped; reset it")
        if slow := _slowdown(gpu.get("clocks_throttle_reasons.active", "0")):
            clocks = f"{gpu.get('clocks.sm', '?')} of {gpu.get('clocks.max.sm', '?')} MHz, {gpu.get('pstate', '?')}"
            found.append(f"GPU {number} is slowed down ({', '.join(slow)}; {clocks})")
    return found


def _slowdown(reasons: str) -> list[str]:
    """Return the hardware slowdowns in ``reasons``, a hexadecimal number such as 0x0000000000000008."""
    with suppress(ValueError):
        bits = int(reasons, 16)
        return [name for bit, name in HARDWARE_SLOWDOWN.items() if bits & bit]
    return []


Devices = tuple[Sequence[Mapping[str, str]], Mapping[str, str]]
"""``gpus`` and ``fabric`` of a node."""


def differences(head: str, first: Devices, other: Devices) -> list[str]:
    """Return the differences of a node's GPUs and ports from the head's; their numbers are compared elsewhere."""
    found = []
    for (number, mine), theirs in zip(enumerate(first[0]), other[0], strict=False):
        found += [
            f"GPU {number}: {name} {theirs[name]}{unit}, but {mine[name]}{unit} on {head}"
            for name, unit in SAME.items()
            if name in mine and name in theirs and mine[name] != theirs[name]
        ]
    here, there = (Counter(ports.values()) for ports in (first[1], other[1]))
    if here != there:
        found.append(f"ports of its fabric: {_ports(there)}; on {head}: {_ports(here)}")
    return found


def _ports(ports: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(ports.items())) or "none"
