"""Machines' networks on one machine: a namespace for each, joined by a bridge. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress


def possible() -> bool:
    """Whether network namespaces and links can be made here."""
    try:
        return (
            subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True).returncode
            == 0
        )
    except FileNotFoundError:
        return False


class Networks:
    """Namespaces of ``names`` in 10.213.``number``.0/24; ``number`` in 1..249, others may be up on this machine. Call
    ``remove``."""

    def __init__(self, number: int, names: Sequence[str]) -> None:
        self._number, self._names = number, list(names)
        self._bridge = f"mgr{number}br"

    def make(self) -> None:
        """Raises subprocess.CalledProcessError; then ``remove`` still has to be called."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.controller}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for i, name in enumerate(self._names):
            _ip("netns", "add", self._namespace(name))
            _ip("link", "add", self._link(i), "type", "veth", "peer", "name", "eth0", "netns", self._namespace(name))
            _ip("link", "set", self._link(i), "master", self._bridge, "up")
            _ip("-n", self._namespace(name), "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", self._namespace(name), "link", "set", link, "up")

    def remove(self) -> None:
        for command in (
            *(("netns", "del", self._namespace(name)) for name in self._names),
            ("link", "del", self._bridge),
        ):
            subprocess.run(["ip", *command], capture_output=True)

    @property
    def controller(self) -> str:
        """This machine's own address there."""
        return f"10.213.{self._number}.1"

    def address(self, number: int) -> str:
        return f"10.213.{self._number}.{11 + number}"

    def inside(self, name: str) -> list[str]:
        """What a command begins with that runs there: nsenter, since `ip netns exec` mounts another /sys, where slurmd
        misses its cgroups."""
        return ["nsenter", f"--net=/run/netns/{self._namespace(name)}"]

    def inside_python(self, name: str, variables: Mapping[str, str]) -> list[str]:
        """Arguments of Python before a module that runs there with further variables."""
        return [
            "-m",
            "tests.system.inside",
            self._namespace(name),
            *(f"{key}={value}" for key, value in variables.items()),
        ]

    def cut(self, name: str) -> None:
        """Nothing comes there or from there any more; nobody is told."""
        _ip("link", "set", self._link(self._names.index(name)), "down")

    def join(self, name: str) -> None:
        """End ``cut``."""
        _ip("link", "set", self._link(self._names.index(name)), "up")

    def drop(self, name: str, kilobits: int) -> None:
        """Drop what comes there in excess of a rate: one packet waits, others are lost."""
        link = ("dev", self._link(self._names.index(name)), "root")
        rate = ("rate", f"{kilobits}kbit", "burst", "3000", "limit", "3000")
        subprocess.run(["tc", "qdisc", "replace", *link, "tbf", *rate], check=True, capture_output=True)

    def keep(self, name: str) -> None:
        """End ``drop``."""
        link = ("dev", self._link(self._names.index(name)), "root")
        subprocess.run(["tc", "qdisc", "del", *link], capture_output=True)

    def of_process(self, pid: int) -> str | None:
        """Return the name of the namespace that a process is in; None if it is in none of them or has ended."""
        with suppress(OSError):
            inode = os.stat(f"/proc/{pid}/ns/net").st_ino
            for name in self._names:
                if os.stat(f"/run/netns/{self._namespace(name)}").st_ino == inode:
                    return name
        return None

    def _namespace(self, name: str) -> str:
        return f"mgr{self._number}-{name}"

    def _link(self, number: int) -> str:
        return f"mgr{self._number}v{number}"


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)
