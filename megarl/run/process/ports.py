"""Ports of a job: fixed ports are checked before launch, the others are chosen among free ones."""

from __future__ import annotations

import random
import socket
from collections import deque

from megarl.core.errors import ConfigError

MIN_PORT, MAX_PORT = 1024, 65535
"""Ports below the minimum are reserved for the system."""
LOWEST, LARGEST = 20000, 32000
"""Range of chosen ports. Linux takes the ports of outgoing connections from 32768 on."""
CLAIMS = 64
"""Ports that a process claims at a time. A job chooses fewer."""
_claims: deque[socket.socket] = deque(maxlen=CLAIMS)


def is_free(host: str, port: int) -> bool:
    """Return True if a server could listen on the port now; port 0: on any port."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def can_be_held(host: str, port: int) -> bool:
    """Return True if ``hold`` would succeed now, and no other job of this user holds the port.

    It fails where ``is_free`` does, and for a minute after a server on this port closed a connection: the kernel keeps
    that connection, and only SO_REUSEADDR would ignore it.
    """
    with socket.socket() as s:  # without SO_REUSEPORT, which would share the port that another job holds
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def hold(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port and does not listen. Until it is closed, no other user can listen there.

    A server's command line shows its port to all users before it listens, and while a dead server is replaced. Another
    user's process listening there would receive the job's key. This user's server can still listen, if its socket has
    SO_REUSEPORT.

    Raises:
        OSError: a process listens there.
    """
    holder = socket.socket()
    try:
        # SO_REUSEADDR must stay off: with it on both sides, another user's socket could be bound here.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def hold_in(held: dict[str, socket.socket], address: str) -> None:
    """Hold the port of HOST:PORT, unless ``held`` has it already. Raises as ``hold``."""
    if address not in held:
        host, _, port = address.rpartition(":")
        held[address] = hold(host, int(port))


def _claim(host: str, port: int) -> bool:
    """Reserve a port among the processes that choose ports; return False if another one has reserved it.

    Seconds pass until a server listens on a chosen port. The claim is a UDP socket on the port's number: it leaves the
    port free for the server, and the kernel ends it with this process.
    """
    claim = socket.socket(type=socket.SOCK_DGRAM)
    try:
        claim.bind((host, port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def needed(replicas: int) -> int:
    """Return the number of ports of a job: trainer rendezvous, weight link, one for each engine."""
    return 2 + replicas


def choose(host: str, count: int, first: int | None) -> list[int]:
    """Return ``count`` ports: ``first``, ``first``+1, … or, if ``first`` is None, free ones.

    Raises:
        ConfigError: a fixed port is in use or out of range, or ``host`` is no address of this machine.
    """
    if not is_free(host, 0):
        raise ConfigError(f"run.host={host} is no address of this machine; give one that its network interfaces have")
    if first is not None:
        ports = list(range(first, first + count))
        if not MIN_PORT <= ports[0] <= ports[-1] <= MAX_PORT:
            raise ConfigError(
                f"run.port={first} takes {ports[0]}..{ports[-1]}; ports are {MIN_PORT}..{MAX_PORT}, choose another "
                "run.port"
            )
        for port in ports:
            if not is_free(host, port):
                raise ConfigError(
                    f"port {port} on {host} is in use (run.port={first} takes {ports[0]}..{ports[-1]}); "
                    "end the process that holds it, choose another run.port, or leave run.port unset"
                )
        return ports
    # Stay below the ports of outgoing connections: gloo opens many before the last of the chosen ports is used.
    candidates = random.SystemRandom().sample(range(LOWEST, LARGEST), LARGEST - LOWEST)
    chosen: list[int] = []
    for port in candidates:
        if len(chosen) == count:
            break
        if can_be_held(host, port) and _claim(host, port):
            chosen.append(port)
    if len(chosen) < count:
        raise ConfigError(f"run.host={host} has no {count} free ports between {LOWEST} and {LARGEST}; set run.port")
    return chosen
