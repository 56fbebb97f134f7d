"""Files in a process's memory that other processes of the same user open by name. They end with the last process that
has them open, so a kill of all leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

PREFIX = "memory:"
"""Beginning of an address, before the name of an abstract Unix socket."""
LONGEST = 255
"""Most bytes of a file's name."""
NAMES, MOST = b"\0", 2**17
"""Request for the names of all files, and most bytes of the answer."""


class MemoryFiles:
    """Makes empty files at their first use and keeps them open until ``close``."""

    def __init__(self) -> None:
        name = f"megarl-{secrets.token_hex(16)}"
        self.address = f"{PREFIX}{name}"
        self._files: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{name}")
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True, name="files in memory").start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):
                connection.settimeout(1.0)  # a client sends at once
                _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                request = connection.recv(LONGEST)
                if user != os.geteuid() or not request:
                    continue
                if request == NAMES:
                    connection.send("\n".join(self._files).encode())
                    continue
                name = request.decode(errors="replace")
                if name not in self._files:
                    self._files[name] = os.memfd_create(name)
                socket.send_fds(connection, [b"file"], [self._files[name]])

    def close(self) -> None:
        """Close the files."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for descriptor in self._files.values():
            os.close(descriptor)


def names_in(place: str) -> list[str]:
    """Return the names of the files of a place, as in ``open_file``. Raises OSError."""
    if not place.startswith(PREFIX):
        return os.listdir(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{place.removeprefix(PREFIX)}")
        connection.send(NAMES)
        return connection.recv(MOST).decode().split()


def open_file(place: str, name: str) -> int:
    """Return a descriptor of a file, which is made if it does not exist. The caller closes it.

    Args:
        place: Address of ``MemoryFiles``, or a folder.

    Raises:
        OSError: the files, or the folder, do not exist or belong to another user.
    """
    if not place.startswith(PREFIX):
        return os.open(os.path.join(place, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{place.removeprefix(PREFIX)}")
        connection.send(name.encode())
        _, descriptors, *_ = socket.recv_fds(connection, 16, 1)
    if not descriptors:
        raise PermissionError(f"{place} gives this user no file")
    try:  # those that are passed share their place in the file
        return os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(descriptors[0])
