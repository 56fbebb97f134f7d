"""A local disk for PostgreSQL's data while the run's directory is on a network filesystem.

The data are parked in the run's directory between two servers. Before a server starts they are copied to the local
disk, and ``away.json`` in the run's directory names that copy, with a token that the copy has too. From then on only
this copy counts. An orderly stop parks it again and removes ``away.json``.
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
"""Filesystems on disks of the machine. The last three are a container's, above such a disk."""
MEMORY = re.compile(r"tmpfs|ramfs")
NETWORK = re.compile(
    r"nfs\d*|lustre|gpfs|mmfs|beegfs|cifs|smb.*|ceph|glusterfs|9p|afs|autofs|pvfs2|orangefs|panfs|wekafs|virtiofs"
    r"|gfs2|ocfs2|fuse(blk|\.(?!fuse-overlayfs).*)?"
)
"""Filesystems that ``store.folder`` is refused on; others that are not known are taken where it names them."""
TEMPORARY = ("SLURM_TMPDIR", "TMPDIR")
"""Variables with a folder that may be on a local disk, best first; then /tmp."""
FIX = "set store.folder to a folder on a local disk, or store.url=postgresql://USER@HOST/DATABASE to a server of yours"
AWAY = "away.json"
TOKEN = "token"
"""File of the folder on the local disk."""
PARKED = "megarl_parked"
"""File of parked data: the token of the copy that they were made from."""
Use = Literal["job", "write", "read"]
"""Purpose of a server: a job, or a tool that may write, or that only reads."""


class Mount(NamedTuple):
    """A filesystem in ``/proc/self/mountinfo``."""

    type: str
    point: Path

    def __str__(self) -> str:
        return f"{self.type} mounted at {self.point}"


def mount_of(path: Path) -> Mount:
    """Return the mount that holds ``path``, or will hold it when it is made."""
    real = Path(os.path.realpath(path))
    os.path.exists(real)  # an automounter mounts what is looked at
    found = Mount("unknown", Path("/"))
    for line in MOUNTS.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        escaped = before.split(b" ")[4]  # a space is \\040
        point = Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), escaped)))
        # The last of several mounts on one point hides those before it.
        if real.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            found = Mount(after.split(b" ")[0].decode(), point)
    return found


def choose(run_dir: Path, setting: str) -> Path | None:
    """Return the folder on a local disk in which a server keeps its data; None for the run's directory.

    Args:
        setting: ``store.folder``; empty takes ``run_dir`` where it is local, else a temporary folder that is.

    Raises:
        ConfigError: ``store.folder`` is no local disk; or it is empty, and none was found.
    """
    if setting:
        folder = Path(setting).absolute()
        if (fault := _fault(folder, refuse_unknown=False)) is not None:
            raise ConfigError(f"store.folder={setting}: {fault}; {FIX}")
        return folder
    mount = mount_of(run_dir)
    if DISK.fullmatch(mount.type) or MEMORY.fullmatch(mount.type):  # a run in memory loses its checkpoints too
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
    """Return the reason why PostgreSQL's data cannot be in ``folder``; None where they can."""
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
    """Why the data are new although the run has begun; empty once they have the run's steps, and for all others."""


class Parking:
    """Moves a server's data between ``home``/data and a local disk. Its calls need the server's lock.

    Args:
        home: Folder of the run's directory in which data are parked.
        disk: Folder on a local disk; None keeps the data in ``home``.
    """

    def __init__(self, home: Path, disk: Path | None, use: Use = "job") -> None:
        self.home, self.disk, self.use = home, disk, use
        self.folder = home
        """Folder of the data, from ``take`` on."""
        self._note = home / AWAY
        self._parked = home / "data"
        self._token = ""
        """Of the copy that this object's server has; empty while it has none to park."""
        self._lock: IO[bytes] | None = None

    @property
    def is_local(self) -> bool:
        """Return True if the data are on the local disk."""
        return self.folder != self.home

    @property
    def lost(self) -> str:
        """Why the store is new although the run has begun; empty where it is not."""
        away = self._away()
        return away.lost if away is not None and away.token == self._token else ""

    def version(self) -> str | None:
        """Return the major version that made the data; None where there are none here."""
        newest = self._newest()
        return None if newest is None else _read(newest / "data" / "PG_VERSION").strip() or None

    def take(self) -> None:
        """Bring the data to the folder in which the server is to start.

        Raises:
            ConfigError: they are on another host or gone, and ``use`` is a tool's; or there is no room for them here.
        """
        recover_directory(self._parked)
        newest, away, lost = self._newest(), self._away(), ""
        if away is not None and newest == self.home:
            self.forget()  # killed after it had parked them
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
                raise JobError(f"the store's data have gone while the server was up: {lost}")
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
        """Return the folder that has the newest data, or is to have the first; None where those are not here."""
        away = self._away()
        if away is None or _read(self._parked / PARKED) == away.token:
            return self.home
        return Path(away.path) if _read(Path(away.path) / TOKEN) == away.token else None

    def _copy_out(self, lost: str) -> None:
        # Of one name for one run: what a kill has left there is removed.
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
        """Keep the server's lock in this process too, where data are to be parked after the server's end."""
        if self.is_local:
            self._lock = os.fdopen(os.dup(lock.fileno()), "ab")

    def let_go(self) -> None:
        """Leave the lock to the server's processes."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def park(self, *, in_order: bool = True) -> None:
        """Copy the data of a server that has ended to the run's directory, and remove them here; let the lock go.

        What fails is logged: the data stay where they are, and the next start on this host goes on with them.

        Args:
            in_order: False for a server that was killed: its data stay too, since not all of its processes may be gone.
        """
        if self.is_local and self.use == "read":
            if not self._token:  # a copy
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder = self.home
        elif self.is_local and in_order:
            self._park()
        elif self.is_local:
            log.warning("PostgreSQL has not ended in order: the store's data stay in %s", self.folder)
        self.let_go()

    def _park(self) -> None:
        if self.lost:
            return  # without the run's steps: the next start fills it
        try:
            new = self.home / "parking"
            shutil.rmtree(new, ignore_errors=True)
            if self._is_ours():
                _copy(self.folder / "data", new)
                (new / PARKED).write_text(self._token)
            if self._is_ours():  # still
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
        """Remove the note that the data are away, once they have been copied back."""
        self._note.unlink(missing_ok=True)
        sync(self.home)

    def _set_aside(self) -> None:
        """Rename parked data that are older than those that are lost."""
        if self._parked.is_dir():
            names = (self.home / f"data.before_{number}" for number in itertools.count(1))
            self._parked.rename(next(path for path in names if not exists(path)))


def _copy(data: Path, target: Path) -> None:
    shutil.copytree(data, target, symlinks=True, ignore=shutil.ignore_patterns("postmaster.pid", PARKED))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
