"""Names that engines and those who use them share, and the end of an engine's log."""

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
"""Variable that makes a server refuse generation until a publication has succeeded: one that was replaced in the middle
of a job must not answer with the weights of the model's files."""


START = "MEGARL_ENGINE_START"
"""Variable with the number of an engine's start (``EngineRow.start``)."""
COLD = "MEGARL_COLD"
"""Variable with the folder whose weights an engine begins with, while ``cold_mark`` lies beside it, instead of those of
the model's files."""
COLD_FOLDER = "cold"
"""That folder within a run's."""
PROVING = "x-megarl-proving"
"""Header of requests that an engine answers although it refuses others."""
CPU_ROUTING = "MEGARL_CPU_ROUTING"
"""Variable that lets an engine on CPU record expert ids."""
ADAPTERS = "MEGARL_ADAPTERS"
"""Variable that gives every request of an engine its adapter (``sync.adapter=separate``)."""

_since: list[float] = []
"""End of this engine's last phase, in Unix seconds."""


def cold_mark(folder: Path) -> Path:
    """File that lies while engines begin with the weights in the folder."""
    return folder.with_suffix(".begin")


def record_phase(name: str) -> None:
    """Enter the time since the last phase, or since this process began, into the engine's timeline."""
    if (place := os.environ.get(TIMELINE)) is None:
        return
    begin, now = (_since or [psutil.Process().create_time()])[-1], time.time()
    _since[:] = [now]
    with suppress(OSError):
        Timeline(Path(place).parent, Path(place).name).add(name, begin, now - begin)


def last_lines(log: Path, count: int = 25, limit: int = 65536) -> str:
    """The last ``count`` non-empty lines of a log, read from its last ``limit`` bytes; they go into error messages."""
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
"""vLLM's ``quantization_config`` of ``rollout.weight_dtype=fp8``. Left alone: routers, which would choose other
experts; of latent attention the layer for which vLLM takes a bfloat16 kernel by its shape, and the projection from
which it makes matrices of its own; vision towers, which are small."""
EIGHT_BIT_BLOCK = 128
"""Rows and columns of experts in 8 bits that share a scale (vLLM's)."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA layers have room for."""
