"""Command line of `megarl watch`. Heavy imports happen when it runs, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from megarl.core.errors import ConfigError

NICE = 10
"""Added to the server's niceness: a job on this machine goes first."""
TEXT = (
    "Show runs while they train, in a browser or in the terminal: curves, timeline, responses, alarms, engines, logs."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="directories of runs, or folders of runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--text", action="store_true", help="in this terminal, without a browser")
    parser.add_argument("--once", action="store_true", help="with --text: print once and end")


def run(arguments: argparse.Namespace) -> int:
    """Serve pages, or print, until Ctrl-C.

    Raises ConfigError if there is no run, or the port is taken.
    """
    from megarl.run.watch.watched import found_runs

    runs = found_runs(arguments.runs or ["runs"])
    with suppress(KeyboardInterrupt):
        if arguments.text or arguments.once:
            from megarl.run.watch.terminal import show

            show(runs, once=arguments.once)
            return 0
        from aiohttp import web

        from megarl.run.process import ports
        from megarl.run.watch.server import HOST, WatchServer

        os.nice(NICE)
        server = WatchServer(runs)
        port = arguments.port or ports.choose(HOST, 1, None)[0]
        sys.stdout.write(f"http://{HOST}:{port}{server.root}\n")
        sys.stdout.write(
            f"From another machine: ssh -L {port}:{HOST}:{port} {Path('/proc/sys/kernel/hostname').read_text()}"
        )
        sys.stdout.flush()
        try:
            web.run_app(server.app(), host=HOST, port=port, print=None, handle_signals=True, access_log=None)
        except OSError as error:
            raise ConfigError(f"--port={port} cannot be used ({error}); give another one, or leave it out") from error
    return 0
