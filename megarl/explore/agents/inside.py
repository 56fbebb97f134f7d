"""First program in a command's sandbox: it forwards connections to the endpoint outside and runs the command.

Run by file name, with the standard library alone: ``inside.py SOCKET PORT DESCRIPTOR BYTES COMMAND...``. The sandbox
has a separate network, so this program accepts connections to the endpoint's port and forwards them to its UNIX socket.
The first BYTES of the command's result go to DESCRIPTOR, which the command cannot access.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading

PIECE = 2**16
PR_SET_DUMPABLE = 4


def main() -> None:
    """Run the command with the endpoint at its port, and end as it does."""
    path, port, descriptor, most, *words = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # else the command could open the descriptor in /proc
    listening = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    threading.Thread(target=accept, args=(listening, path), daemon=True).start()
    try:
        status = subprocess.call(words)
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        status = 127
    if status == 0:
        try:
            pass_on(os.environ["MEGARL_RESULT"], int(descriptor), int(most))
        except OSError as error:
            sys.stderr.write(f"its result: {error.strerror}\n")
            status = 1
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)


def pass_on(result: str, descriptor: int, most: int) -> None:
    """Write a mark and the result's first bytes; nothing without a result. Raises OSError."""
    try:
        source = os.open(result, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(source, "rb") as file, open(descriptor, "wb") as target:
        target.write(b"R" + file.read(most))


def accept(listening: socket.socket, path: str) -> None:
    """Forward each connection with two threads, one for each direction."""
    while True:
        inner, _ = listening.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(path)
        except OSError:  # the endpoint is gone: so is the job
            inner.close()
            continue
        for ends in ((inner, outer), (outer, inner)):
            threading.Thread(target=copy, args=ends, daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source or target is closed; then close the target for writing."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
        return
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
