"""Share one gloo device among all process groups of a process."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


def share() -> None:
    """Let process groups that torch makes from now on share one device. Safe to call twice.

    By default torch gives each group a device: a listening port, and a thread that wakes up a hundred times a second. A
    trainer rank of Megatron-Core has twenty groups. Results are bitwise the same with one device.
    """
    group: Any = dist.ProcessGroupGloo
    start = group.__init__
    if getattr(start, "shares", False):
        return

    def __init__(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        if isinstance(timeout, timedelta):
            options = group._Options()
            options._timeout = timeout
            options._devices = list(_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")))
            options._threads = 2 * len(options._devices)
            timeout = options
        start(self, store, rank, size, timeout)

    __init__.shares = True  # type: ignore[attr-defined]
    group.__init__ = __init__


@cache
def _devices(pid: int, interfaces: str) -> tuple[Any, ...]:
    """Devices of a process, by gloo's interface variable. A fork creates new devices, since it inherits no threads."""
    group: Any = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return tuple(group.create_device(interface=name) for name in names) or (group.create_default_device(),)
