"""Files that a job's processes may leave behind: temporary folders, and segments of shared memory."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from megarl.core.durable import write_text
from megarl.core.processes.machine import group_members, processes_with, start_ticks, started_at

_SEGMENT = re.compile(
    r"/dev/shm/(psm_[0-9a-f]+"  # multiprocessing.shared_memory: vLLM's queues
    r"|torch_[0-9]+_[0-9]+_[0-9]+"  # torch's shared tensors
    r"|[^/]+-cpushm[^/]*"  # vLLM's tensor parallelism on a CPU
    r"|vllm_(offload|ec)_[^/]+\.mmap"  # caches on the host
    r"|nccl-[A-Za-z0-9]{6}"  # named by mkstemp
    r"|__KMP_REGISTERED_LIB_[0-9]+_[0-9]+"  # LLVM's OpenMP
    r"|PostgreSQL\.[0-9]+)"  # while initdb fills its folder
)
CLOCK_SLACK_S = 2.0
"""Largest difference in seconds between a process's start, counted from the boot, and a file system's clock."""
FOLDER_PREFIX = "megarl-"
OWNER = "megarl_owner.json"
"""File in an engine's temporary folder: its run and supervisor."""
LONGEST_SOCKET = 107
"""Most bytes of a Unix socket's path."""
_SOCKET = len("/megarl-01234567/01234567-0123-0123-0123-0123456789ab")


def own_folder(run_dir: Path | None = None) -> tuple[Path, dict[str, str]]:
    """Make a folder for one engine's temporary files; returns it and the environment variables for it. vLLM does not
    remove its sockets.

    A file in it names the run. If supervisor and reaper are killed, the run's next start removes the folder
    (``remove_stale_folders``).
    """
    shared = tempfile.gettempdir()
    folder = str(folder_of_run(run_dir, _folder_root()))
    environment = {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}
    if (
        "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    ):  # keep torch's compile cache where it is without us, for later engines
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name
            user = f"uid_{os.getuid()}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(shared, f"torchinductor_{user}")
    return Path(folder), environment


def folder_of_run(run_dir: Path | None, root: str) -> Path:
    """Make a folder in ``root`` whose file names the run; ``remove_stale_folders`` finds it in its roots."""
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root)
    owner = {
        "run_dir": None if run_dir is None else str(run_dir.resolve()),
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()),
    }
    Path(folder, OWNER).write_text(json.dumps(owner))
    return Path(folder)


def record_segments(folder: Path, segments: Iterable[Path]) -> None:
    """Write an engine's shared memory into its folder: the next start of the run removes both."""
    owner = json.loads((folder / OWNER).read_text())
    found = {str(path): path.stat().st_ino for path in sorted(segments) if path.is_file()}
    write_text(folder / OWNER, json.dumps(owner | {"segments": found}))


def remove_folder(folder: Path) -> None:
    """Remove an engine's folder and the shared memory recorded there."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # no record
        for name, inode in json.loads((folder / OWNER).read_text())["segments"].items():
            path = Path(name)
            if _SEGMENT.fullmatch(name) and _is_own(path, {os.geteuid()}) and path.stat().st_ino == inode:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _folder_root() -> str:
    shared = tempfile.gettempdir()
    return shared if len(os.fsencode(shared)) + _SOCKET <= LONGEST_SOCKET else "/tmp"


def remove_stale_folders(run_dir: Path) -> list[Path]:
    """Remove folders left on this machine by earlier starts of a run, and their recorded shared memory; return the
    folders. Folders used by a living process stay."""
    removed = []
    roots = map(Path, {_folder_root(), tempfile.gettempdir()})
    for folder in (folder for root in roots for folder in root.glob(f"{FOLDER_PREFIX}*")):
        try:
            owner = json.loads((folder / OWNER).read_text())
            of_run, pid, start = owner["run_dir"] == str(run_dir.resolve()), int(owner["pid"]), owner["start"]
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ):  # another program's or user's, or being created
            continue
        if of_run and start_ticks(pid) != start and not _used(folder):
            remove_folder(folder)
            removed.append(folder)
    return removed


def _used(folder: Path) -> bool:
    """Return True if a process uses it as temporary folder: an engine's worker, or a descendant."""
    return bool(processes_with(b"TMPDIR=" + os.fsencode(folder)))


def shared_memory(group: int) -> set[Path]:
    """Return the segments in /dev/shm created and mapped by a process group; vLLM with tp > 1 and a killed initdb leave
    some behind.

    Models, environments or run directories may be mapped from /dev/shm too. So only regular files directly in it count,
    owned by this user or the mapping process, not older than the group, and named as in ``_SEGMENT``.
    """
    members = group_members(group)
    starts = (started_at(pid, earliest=True) for pid in members)  # files have the times of before a jump of the clock
    since = min(filter(None, starts), default=0.0) - CLOCK_SLACK_S
    segments = set()
    for pid in members:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            users = {os.geteuid(), Path(f"/proc/{pid}").stat().st_uid}
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if _SEGMENT.fullmatch(path) and _is_own(Path(path), users, since):
                    segments.add(Path(path))
    return segments


def _is_own(path: Path, users: Collection[int], since: float = 0.0) -> bool:
    """Return True for a regular file of one of ``users`` changed after ``since``."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in users and found.st_ctime >= since
