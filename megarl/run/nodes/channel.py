"""JSON lines between two supervisors of a job over one TCP connection; both have proven that they have the job's
key."""

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
"""Maximum bytes of a line of the greeting: an unauthenticated peer cannot make this process buffer more."""
GREETING_S = 10.0


class ChannelClosed(JobError):
    """The peer has closed the connection, or was silent for too long."""


class Channel:
    """Messages in both directions; any thread may send, only one receives.

    Args:
        silence_s: Timeout of ``receive`` in seconds; both sides send messages more often.
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
        """Return the address of this machine, as the peer sees it."""
        return str(self.socket.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Send a message. Raises ChannelClosed."""
        try:
            with self._sending:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(f"connection lost: {error}") from error

    def receive(self, limit: int = MAX_LINE_BYTES) -> dict[str, Any]:
        """Return the next message, of at most ``limit`` bytes. Raises ChannelClosed."""
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
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a receiving thread
        with contextlib.suppress(OSError):
            self._lines.close()
        self.socket.close()


def greet(connection: socket.socket, key: str, *, serving: bool, silence_s: float) -> Channel:
    """Authenticate both sides: each returns an HMAC of the other's random challenge, so the key is never sent.

    Raises:
        ChannelClosed: the peer has another key, or sends nothing in time.
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
