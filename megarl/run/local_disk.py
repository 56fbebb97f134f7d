"""A local disk for PostgreSQL's data while the run's directory is on a network filesystem.

Between two servers the data are parked in the run's directory. Before a server starts, they are copied to the local
disk. ``away.json`` in the run's directory then names that copy, with a token that the copy has too; only this copy is
valid. An orderly stop copies it back and removes ``away.json``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import shutil
from hashlib import sha256
from pathlib import Path
from typing import IO, Literal, NamedTuple

from megarl.core.durable import exists, read_json, recover_directory, replace_directory, sync, sync_tree, write_text
from megarl.core.errors import ConfigError, JobError

log = logging.getLogger(__name__)

MOUNTS = Path("/proc/self/mountinfo")
DISK = re.compile(r"ext[234]|xfs|btrfs|zfs|bcachefs|f2fs|jfs|nilfs2|reiserfs|overlay|aufs|fuse\.fuse-overlayfs")
"""Filesystems on disks of the machine. The last three are a container's layers above such a disk."""
MEMORY = re.compile(r"tmpfs|ramfs")
NETWORK = re.compile(
    r"nfs\d*|lustre|gpfs|mmfs|beegfs|cifs|smb.*|ceph|glusterfs|9p|afs|autofs|pvfs2|orangefs|panfs|wekafs|virtiofs"
    r"|gfs2|ocfs2|fuse(blk|\.(?!fuse-overlayfs).*)?"
)
"""Network filesystems, refused for ``store.folder``. Unknown filesystems are accepted if ``store.folder`` names
them."""
TEMPORARY = ("SLURM_TMPDIR", "TMPDIR")
"""Variables with a folder that may be on a local disk, best first; then /tmp."""
FIX = "set store.folder to a folder on a local disk, or store.url=postgresql://USER@HOST/DATABASE to a server of yours"
AWAY = "away.json"
TOKEN = "token"
"""File in the folder on the local disk, with the copy's token."""
PARKED = "megarl_parked"
"""File in the parked data: token of the copy that they were made from."""
Use = Literal["job", "write", "read"]
"""Purpose of a server: a job, a tool that may write, or a tool that only reads."""


class Mount(NamedTuple):
    """A filesystem in ``/proc/self/mountinfo``."""

    type: str
    point: Path

    def __str__(self) -> str:
        return f"{self.type} mounted at {self.point}"


def mount_of(path: Path) -> Mount:
    """Return the mount of ``path``, which need not exist yet."""
    real = Path(os.path.realpath(path))
    os.path.exists(real)  # an automounter mounts a path when it is accessed
    found = Mount("unknown", Path("/"))
    for line in MOUNTS.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        escaped = before.split(b" ")[4]  # mountinfo writes a space as \\040
        point = Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), escaped)))
        # The last of several mounts on one point hides those before it.
        if real.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            found = Mount(after.split(b" ")[0].decode(), point)
    return found


def choose(run_dir: Path, setting: str) -> Path | None:
    """Return the folder on a local disk for a server's data; None for the run's directory.

    Args:
        setting: ``store.folder``; empty takes ``run_dir`` if that is local, else a local temporary folder.

    Raises:
        ConfigError: ``store.folder`` is not on a local disk; or it is empty and no local disk was found.
    """
    if setting:
        folder = Path(setting).absolute()
        if (fault := _fault(folder, refuse_unknown=False)) is not None:
            raise ConfigError(f"store.folder={setting}: {fault}; {FIX}")
        return folder
    mount = mount_of(run_dir)
    if DISK.fullmatch(mount.type) or MEMORY.fullmatch(mount.type):  # in memory the checkpoints would be lost too
        return None
    folders = {f"${name}={os.environ[name]}": os.environ[name] for name in TEMPORARY if os.environ.get(name)}
    refused = []
    for name, place in {**folders, "/tmp": "/tmp"}.items():
        folder = Path(place).absolute()
        if (fault := _fault(folder, refuse_unknown=True)) is None:
            return folder
        refused.append(f"{name}: {fault}")
    raise ConfigError(
        f"run.dir={run_dir} is on {mount}, where PostgreSQL's data are slow and unsafe, and no other folder is on a "
        f"local disk ({'; '.join(refused)}); {FIX}"
    )


def _fault(folder: Path, *, refuse_unknown: bool) -> str | None:
    """Return the reason why PostgreSQL's data cannot be in ``folder``; None if they can."""
    mount = mount_of(folder)
    if MEMORY.fullmatch(mount.type):
        return f"it is on {mount}, in memory: a reboot loses the data"
    if NETWORK.fullmatch(mount.type) or (refuse_unknown and not DISK.fullmatch(mount.type)):
        return f"it is on {mount}, which is no local disk"
    if not folder.exists():
        return "it does not exist"
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return "it is no folder that this user can write in"
    return None


class Away(NamedTuple):
    """Content of ``away.json``: where the data are."""

    host: str
    path: str
    token: str
    lost: str
    """Reason why the store is new although the run has begun; empty otherwise, and once the store has the run's
    steps."""


class Parking:
    """Moves a server's data between ``home``/data and a local disk. Callers must hold the server's lock.

    Args:
        home: Folder of the run's directory in which data are parked.
        disk: Folder on a local disk; None keeps the data in ``home``.
    """

    def __init__(self, home: Path, disk: Path | None, use: Use = "job") -> None:
        self.home, self.disk, self.use = home, disk, use
        self.folder = home
        """Folder of the data after ``take``."""
        self._note = home / AWAY
        self._parked = home / "data"
        self._token = ""
        """Token of the copy that this server uses; empty if there is no copy to park."""
        self._lock: IO[bytes] | None = None

    @property
    def is_local(self) -> bool:
        """Return True if the data are on the local disk."""
        return self.folder != self.home

    @property
    def lost(self) -> str:
        """Reason why the store is new although the run has begun; empty if it is not new."""
        away = self._away()
        return away.lost if away is not None and away.token == self._token else ""

    def version(self) -> str | None:
        """Return PostgreSQL's major version that made the data; None if there are no data on this host."""
        newest = self._newest()
        return None if newest is None else _read(newest / "data" / "PG_VERSION").strip() or None

    def take(self) -> None:
        """Choose the server's folder; copy parked data there if it is on the local disk.

        Raises:
            ConfigError: the data are on another host or gone, and ``use`` is not ``job``; or they do not fit here.
        """
        recover_directory(self._parked)
        newest, away, lost = self._newest(), self._away(), ""
        if away is not None and newest == self.home:
            self.forget()  # a kill came between parking and removing the note
            away, self._token = None, ""
        if self._token and (away is None or away.token != self._token):
            raise JobError(f"another start has begun a new store; the data of this one stay in {self.folder}")
        if away is not None and newest is not None:
            self.folder, self._token = newest, away.token
            return
        if away is not None:
            here = away.host == os.uname().nodename
            lost = (
                f"{away.path} of this host, {away.host}, is gone" if here else f"they are on {away.host}: {away.path}"
            )
            if self._token:
                raise JobError(f"the store's data disappeared while the server was running: {lost}")
            if self.use != "job":
                raise ConfigError(
                    f"the data of the store are not in {self.home}: {lost}; run the command there, or start the job "
                    "again, which goes on with a new store"
                )
            self._set_aside()
        elif self.disk is None:
            self.folder, self._token = self.home, ""
            return
        self._copy_out(lost)

    def _newest(self) -> Path | None:
        """Return the folder of the newest data, or for the first data; None if the newest are not on this host."""
        away = self._away()
        if away is None or _read(self._parked / PARKED) == away.token:
            return self.home
        return Path(away.path) if _read(Path(away.path) / TOKEN) == away.token else None

    def _copy_out(self, lost: str) -> None:
        # One name per run, so that the remains of a killed start are found and removed.
        name = f"megarl-postgres-{sha256(os.fsencode(self.home)).hexdigest()[:16]}"
        folder = (self.disk or self.home) / name
        try:
            if exists(folder):
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
            if not lost and self._parked.is_dir():
                _copy(self._parked, folder / "data")
            token = secrets.token_hex(8)
            if self.use != "read":
                write_text(folder / TOKEN, token)
                sync_tree(folder)
                sync(folder.parent)
                away = Away(os.uname().nodename, str(folder), token, lost)
                write_text(self._note, json.dumps(away._asdict()))
                self._token = token
        except OSError as error:
            raise ConfigError(f"PostgreSQL's data cannot be copied to {folder} ({error}); {FIX}") from error
        self.folder = folder

    def settle(self) -> None:
        """Record that a new store has the run's steps."""
        away = self._away()
        assert away is not None and away.token == self._token
        write_text(self._note, json.dumps(away._replace(lost="")._asdict()))

    def hold(self, lock: IO[bytes]) -> None:
        """Keep the server's lock in this process too, if its data must be parked after the server ends."""
        if self.is_local:
            self._lock = os.fdopen(os.dup(lock.fileno()), "ab")

    def let_go(self) -> None:
        """Close this process's descriptor of the lock; the server's processes keep theirs."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def park(self, *, in_order: bool = True) -> None:
        """Copy an ended server's data to the run's directory, remove them from the local disk, and release the lock.

        A failure is logged: the data stay on the local disk, and the next start on this host uses them.

        Args:
            in_order: False for a server that was killed: its data stay too, since some of its processes may still run.
        """
        if self.is_local and self.use == "read":
            if not self._token:  # this server only read a copy
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder = self.home
        elif self.is_local and in_order:
            self._park()
        elif self.is_local:
            log.warning("PostgreSQL has not ended in order: the store's data stay in %s", self.folder)
        self.let_go()

    def _park(self) -> None:
        if self.lost:
            return  # does not have the run's steps yet: the next start fills it
        try:
            new = self.home / "parking"
            shutil.rmtree(new, ignore_errors=True)
            if self._is_ours():
                _copy(self.folder / "data", new)
                (new / PARKED).write_text(self._token)
            if self._is_ours():  # the copy took time: check again
                replace_directory(new, self._parked)
                self.forget()
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder, self._token = self.home, ""
            else:
                log.warning("the store's data stay in %s: another start has begun a new store", self.folder)
        except OSError as error:
            log.error("the store's data stay in %s: they cannot be copied to %s (%s)", self.folder, self.home, error)

    def _is_ours(self) -> bool:
        away = self._away()
        return away is not None and away.token == self._token

    def _away(self) -> Away | None:
        return Away(**read_json(self._note)) if self._note.is_file() else None

    def forget(self) -> None:
        """Remove ``away.json`` after the data have been copied back."""
        self._note.unlink(missing_ok=True)
        sync(self.home)

    def _set_aside(self) -> None:
        """Rename parked data, which are older than the lost data."""
        if self._parked.is_dir():
            names = (self.home / f"data.before_{number}" for number in itertools.count(1))
            self._parked.rename(next(path for path in names if not exists(path)))


def _copy(data: Path, target: Path) -> None:
    shutil.copytree(data, target, symlinks=True, ignore=shutil.ignore_patterns("postmaster.pid", PARKED))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
