"""JSON lines between two supervisors of a job, over one TCP connection; both have proven to know the job's key."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from megarl.core import proof
from megarl.core.errors import JobError

MAX_LINE_BYTES = 2**24
GREETING_BYTES = 2**12
"""Limit of a line of the greeting: an unauthenticated peer can make this process keep no more."""
GREETING_S = 10.0


class ChannelClosed(JobError):
    """The other side is gone, or silent for too long."""


class Channel:
    """Messages both ways; any thread may send, one receives.

    Args:
        silence_s: How long ``receive`` waits; both sides send something more often than that.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self.socket = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.silence_s = silence_s
        connection.settimeout(silence_s)

    @property
    def own_address(self) -> str:
        """Address of this machine, as the other side sees it."""
        return str(self.socket.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Raises ChannelClosed."""
        try:
            with self._sending:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(f"connection lost: {error}") from error

    def receive(self, limit: int = MAX_LINE_BYTES) -> dict[str, Any]:
        """The next message, of at most ``limit`` bytes. Raises ChannelClosed."""
        try:
            line = self._lines.readline(limit)
            if not line.endswith(b"\n"):
                raise ChannelClosed(
                    "connection closed" if len(line) < limit else f"a message of more than {limit} bytes"
                )
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            return message
        except TimeoutError as error:
            raise ChannelClosed(f"silent for {self.silence_s:.0f} s") from error
        except RecursionError as error:
            raise ChannelClosed("a message that is nested too deeply") from error
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"connection lost: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        with contextlib.suppress(OSError):
            self._lines.close()
        self.socket.close()


def greet(connection: socket.socket, key: str, *, serving: bool, silence_s: float) -> Channel:
    """Both sides answer the other's random challenge with an HMAC of it, so the key itself is never sent.

    Raises:
        ChannelClosed: the other side does not know the key, or sends nothing in time.
    """
    channel = Channel(connection, GREETING_S)
    try:
        _prove(channel, key, serving)
    except BaseException:
        channel.close()
        raise
    channel.silence_s = silence_s
    connection.settimeout(silence_s)
    return channel


def _prove(channel: Channel, key: str, serving: bool) -> None:
    own, other = ("head", "node") if serving else ("node", "head")
    mine = proof.challenge()
    channel.send(challenge=mine)
    theirs = str(channel.receive(GREETING_BYTES).get("challenge"))
    channel.send(proof=proof.prove(key, theirs, own))
    if not proof.is_proof(channel.receive(GREETING_BYTES).get("proof"), key, mine, other):
        raise ChannelClosed("the other side has another key (MEGARL_JOB_KEY)")
