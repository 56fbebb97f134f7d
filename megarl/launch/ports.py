"""Ports of a job: fixed ones are checked before launch, the others are chosen free."""

from __future__ import annotations

import socket

from megarl.errors import ConfigError


def is_free(host: str, port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def choose(host: str, count: int, first: int | None) -> list[int]:
    """``count`` ports: ``first``, ``first``+1, … or free ones of the machine's choice.

    Raises:
        ConfigError: a fixed port is in use.
    """
    if first is not None:
        ports = list(range(first, first + count))
        for port in ports:
            if not is_free(host, port):
                raise ConfigError(
                    f"port {port} on {host} is in use (run.port={first} takes {ports[0]}..{ports[-1]}); "
                    "end the process that holds it, choose another run.port, or leave run.port unset"
                )
        return ports
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
