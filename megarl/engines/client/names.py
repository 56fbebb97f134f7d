"""Names, keys and addresses that engines and their clients share.

vLLM's ``--api-key`` guards only some prefixes, and its development routes (``/collective_rpc`` above all) run any code
that the caller names. This middleware guards all paths. Standard library only: vLLM imports it by name
(``--middleware megarl.engines.client.names.RequireKey``).
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError
from megarl.core.metrics import TIMELINE, Timeline
from megarl.core.processes.machine import born

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
    begin, now = (_since or [born()])[-1], time.time()
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


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "MEGARL_JOB_KEY"


def bearer(key: str) -> dict[str, str]:
    """Return the header that ``RequireKey`` requires."""
    return {"Authorization": f"Bearer {key}"}


class RequireKey:
    """ASGI middleware: 401 for every request whose ``Authorization`` header is not ``Bearer $MEGARL_JOB_KEY``."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(f"{KEY_VARIABLE} is empty: an engine server needs the job's key in its environment")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the job's key is missing or wrong"})
        else:
            await _unauthorized(send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _unauthorized(send: Send) -> None:
    body = b'{"error": "the job\'s key is missing or wrong: send Authorization: Bearer <key>"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class JobAddresses:
    link_host: str
    link_port: int
    """TCP store of the weight link; trainer rank 0 listens there."""
    key: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobAddresses:
        """Read MEGARL_LINK (host:port) and MEGARL_JOB_KEY.

        Raises:
            ConfigError: one of them is missing.
        """
        missing = [name for name in ("MEGARL_LINK", KEY_VARIABLE) if not environment.get(name)]
        if missing:
            raise ConfigError(f"{', '.join(missing)} not in the environment: this process is started by `megarl train`")
        host, _, port = environment["MEGARL_LINK"].rpartition(":")
        return cls(host, int(port), environment[KEY_VARIABLE])
