"""Names shared by engines and their clients, and the end of an engine's log."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megarl.core.metrics import TIMELINE, Timeline

PLUGIN = "megarl"
"""Entry point of the groups ``vllm.general_plugins`` and ``vllm.endpoint_plugins``, and name of the weight backend."""

UNTIL_PUBLISHED = "MEGARL_UNTIL_PUBLISHED"
"""Variable that makes a server refuse generation until a publication has succeeded: a replacement in a running job must
not sample with the model's files."""


START = "MEGARL_ENGINE_START"
"""Variable with the number of an engine's start (``EngineRow.start``)."""
COLD = "MEGARL_COLD"
"""Variable with a weights folder; while its ``cold_mark`` exists, starting engines load it instead of the model's
files."""
COLD_FOLDER = "cold"
"""Name of that folder in the run's directory."""
PROVING = "x-megarl-proving"
"""Header of requests that an engine serves even while it refuses others."""
CPU_ROUTING = "MEGARL_CPU_ROUTING"
"""Variable that lets an engine on CPU record expert ids."""
ADAPTERS = "MEGARL_ADAPTERS"
"""Variable that gives every request of an engine its adapter (``sync.adapter=separate``)."""

_since: list[float] = []
"""End of this engine's last phase, in Unix seconds."""


def cold_mark(folder: Path) -> Path:
    """Return the marker file of ``folder``; while it exists, starting engines load the folder's weights."""
    return folder.with_suffix(".begin")


def record_phase(name: str) -> None:
    """Record the time since the last phase, or since this process's start, in the engine's timeline."""
    if (place := os.environ.get(TIMELINE)) is None:
        return
    begin, now = (_since or [psutil.Process().create_time()])[-1], time.time()
    _since[:] = [now]
    with suppress(OSError):
        Timeline(Path(place).parent, Path(place).name).add(name, begin, now - begin)


def last_lines(log: Path, count: int = 25, limit: int = 65536) -> str:
    """Return the last ``count`` non-empty lines of a log, from its last ``limit`` bytes, for error messages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        return f"(no log at {log}: {error.strerror})"
    return "\n".join(lines[-count:])


EIGHT_BITS = {
    "linear": "fp8_per_channel",
    "moe": "fp8_per_block",
    "ignore": ("*.gate", "*.q_a_proj", "*.kv_a_proj_with_mqa", "*.kv_b_proj", "visual.*"),
}
"""vLLM's ``quantization_config`` of ``rollout.weight_dtype=fp8``. Not quantised: routers, which would choose other
experts; in latent attention the layer with a bfloat16 kernel in vLLM, and the projection that vLLM derives matrices
from; vision towers, which are small."""
EIGHT_BIT_BLOCK = 128
"""Rows and columns of experts in 8 bits that share a scale (vLLM's)."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks supported by vLLM's LoRA layers."""
