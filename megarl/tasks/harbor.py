"""Task folders of Harbor (Apache-2.0), Terminal-Bench's format, read as rows. Written for harbor 0.26.

A folder has ``task.toml``, ``instruction.md``, ``environment/Dockerfile``, ``tests/test.sh`` and mostly
``solution/solve.sh``. No container is made of it here, so what only a container could give is refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from megarl.core.errors import DataError
from megarl.core.schema import Task

log = logging.getLogger(__name__)

SOURCE = "harbor"
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
"""Leading lines of an instruction that are removed, as in Harbor."""
REFUSED = {
    "steps": "has several steps",
    "environment.docker_image": "needs an image",
    "environment.gpus": "needs GPUs",
    "environment.tpu": "needs a TPU",
    "environment.mcp_servers": "needs MCP servers",
    "environment.skills_dir": "gives an agent skills",
    "environment.healthcheck": "needs a service",
    "environment.allowed_hosts": "needs a network",
    "verifier.allowed_hosts": "needs a network",
    "agent.allowed_hosts": "needs a network",
    "verifier.environment": "tests in a container of its own",
    "verifier.collect": "collects from services",
}
"""Settings of task.toml that need a container engine, unless they are 0 or empty."""
NOT_READ = ("docker-compose.yaml", "docker-compose.yml", ".dockerignore")
SYSTEM = ("bin", "dev", "etc", "lib", "lib32", "lib64", "logs", "proc", "python", "run", "sbin", "sys", "tests", "usr")
"""Folders of / in which a task may not have files."""
MEMORY_MB, STORAGE_MB = 2048, 1024
"""Default if task.toml names none."""
TESTS_MB = 256
"""Size limit of ``tests`` in MB."""
PAGE = 4096
MOST = 10**15
"""Upper bound of numbers in task.toml, in seconds or MB."""
SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True)
class HarborTask:
    """One folder, checked."""

    folder: Path
    instruction: str
    workdir: str
    copies: tuple[tuple[Path, str], ...]
    """Files and folders of ``COPY`` -> absolute paths in the sandbox."""
    agent_s: float
    verifier_s: float
    memory_mb: int
    storage_mb: int
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    asks_network: bool = False


def read_folders(path: Path, prefix: str) -> list[Task]:
    """Return the row of a task folder, or the rows of all task folders in a folder, by name. Raises DataError naming
    file and fix.

    A row has a digest of its folder's files, so that it is another row when they change.
    """
    folders = [path] if (path / "task.toml").exists() else sorted(child for child in path.iterdir() if child.is_dir())
    tasks = [read_folder(folder) for folder in folders if _is_task(folder)]
    if not tasks:
        raise DataError(f"{path}: has no Harbor task; give a folder with task.toml, or one of such folders")
    for task in tasks:
        if task.asks_network:
            log.warning("%s: the task asks for a network; it has none here", task.folder / "task.toml")
    return [
        Task(
            f"{prefix}/{i}",
            SOURCE,
            ({"role": "user", "content": task.instruction},),
            SOURCE,
            {"style": SOURCE, "ground_truth": ""},
            {"folder": str(task.folder), "name": task.folder.name, "digest": _digest(task.folder)},
        )
        for i, task in enumerate(tasks)
    ]


def read_folder(folder: Path) -> HarborTask:
    """Read and check one task. Raises DataError naming file and fix."""
    folder = folder.resolve()
    file = folder / "task.toml"
    try:
        found = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{file}: is not TOML ({error})") from error
    for name, why in REFUSED.items():
        if _value(file, found, name):
            _refuse(file, f"{name}: the task {why}, and there is no container engine here; remove the task")
    for name, only in (("environment.os", "linux"), ("verifier.environment_mode", "shared")):
        if str(_value(file, found, name) or only).lower() != only:
            _refuse(file, f"{name} must be {only!r}, got {_value(file, found, name)!r}; remove the task")
    modes = [_value(file, found, f"{section}.network_mode") for section in ("environment", "agent", "verifier")]
    instruction = _without_canary(_text(folder / "instruction.md"))
    if not instruction.strip():
        _refuse(folder / "instruction.md", "is empty; write what is to be done")
    _text(folder / "tests" / "test.sh")
    tests = folder / "tests"
    for link in (tests, *sorted(tests.rglob("*"))):
        if link.is_symlink() and (link in (tests, tests / "test.sh") or _leads_out(link, tests)):
            _refuse(link, "is a link, and what it leads to is in no sandbox; put the files there themselves")
    workdir, copies = _docker(folder / "environment")
    workdir = _value(file, found, "environment.workdir") or workdir
    if not isinstance(workdir, str):
        _refuse(folder / "environment" / "Dockerfile", "sets no WORKDIR; add one, or workdir to [environment] in it")
    storage_mb = _size(file, found, "environment.storage", STORAGE_MB)
    _check_room(folder / "environment" / "Dockerfile", copies, storage_mb, "raise storage_mb of task.toml")
    _check_room(folder / "tests", [(folder / "tests", "/tests")], TESTS_MB, "make them smaller")
    return HarborTask(
        folder,
        instruction,
        _place(file, workdir, "/"),
        copies,
        _number(file, found, "agent.timeout_sec", math.inf),
        _number(file, found, "verifier.timeout_sec", 600.0),
        _size(file, found, "environment.memory", MEMORY_MB),
        storage_mb,
        _variables(file, found, "environment.env"),
        _variables(file, found, "verifier.env"),
        asks_network="public" in modes or bool(_value(file, found, "environment.allow_internet")),
    )


def _is_task(folder: Path) -> bool:
    """Return True for a folder with task.toml; one that has only an instruction is refused later."""
    return (folder / "task.toml").exists() or (folder / "instruction.md").exists()


def _digest(folder: Path) -> str:
    """Return the digest of a task's used files, with names, contents and modes."""
    found = hashlib.blake2b(digest_size=8)
    for place in ("task.toml", "environment", "tests"):
        for path in sorted([folder / place, *(folder / place).rglob("*")]):
            try:
                data = os.readlink(os.fsencode(path)) if path.is_symlink() else _bytes(path)
                head = os.fsencode(path.relative_to(folder)), path.lstat().st_mode, len(data)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error}); make it readable") from error
            found.update(repr(head).encode() + data)
    return found.hexdigest()


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _leads_out(link: Path, folder: Path) -> bool:
    """Return True for a link that a sandbox with only this folder and /usr cannot resolve."""
    target = os.readlink(link)
    if os.path.isabs(target):
        return not target.startswith("/usr/")
    return not Path(os.path.normpath(link.parent / target)).is_relative_to(folder)


def _check_room(file: Path, copies: Iterable[tuple[Path, str]], most_mb: int, fix: str) -> None:
    """Refuse files that exceed the size of their target folder in /."""
    pages: dict[str, int] = {}
    for source, place in copies:
        for path in [source, *source.rglob("*")]:
            if path.is_file() and not path.is_symlink():
                pages[os.path.normpath(f"{place}/{path.relative_to(source)}")] = -(-path.stat().st_size // PAGE)
    for first in sorted({place.split("/")[1] for place in pages}):
        mb = sum(number for place, number in pages.items() if place.split("/")[1] == first) * PAGE / 2**20
        if mb > most_mb:
            _refuse(file, f"has {mb:.0f} MB of files for /{first}, which has room for {most_mb} MB; {fix}")


def _refuse(file: Path, rule: str) -> NoReturn:
    raise DataError(f"{file}: {rule}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file, which each Harbor task has; add it or remove the folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); make it a readable text file") from error


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def _value(file: Path, found: Mapping[str, Any], name: str) -> Any:
    """Value of ``section.key``; None where it is not set."""
    for part in name.split("."):
        if not isinstance(found, Mapping):
            _refuse(file, f"{name.rpartition('.')[0]} must be a table, got {found!r:.60}")
        found = found.get(part)  # type: ignore[assignment]
        if found is None:
            return None
    return found


def _number(file: Path, found: Mapping[str, Any], name: str, default: float) -> float:
    value = _value(file, found, name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
        _refuse(file, f"{name} must be a number above 0 and below {MOST:.0e}, got {str(value):.60}")
    return float(value)


def _size(file: Path, found: Mapping[str, Any], name: str, default: int) -> int:
    """Return MB from ``NAME_mb``, or from the older ``NAME``, a text such as 2G."""
    old = _value(file, found, name)
    if old is None:
        return math.ceil(_number(file, found, f"{name}_mb", default))
    given = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", str(old).strip().upper())
    if given is None or not 0 < (mb := float(given[1]) * SIZES[given[2]]) < MOST:
        _refuse(file, f"{name} must be a size such as 2G, got {old!r:.60}")
    return math.ceil(mb)


def _variables(file: Path, found: Mapping[str, Any], name: str) -> dict[str, str]:
    given = _value(file, found, name) or {}
    for key, value in given.items() if isinstance(given, dict) else [(name, given)]:
        if not isinstance(value, str):
            _refuse(file, f"{name} must be a table of texts, got {given!r:.60}")
        if not re.fullmatch(r"[^=\0]+", key) or "\0" in value:
            _refuse(file, f"{name}.{key!r}: no variable has such a name or value; write no = in a name, and no NUL")
        if "${" in value:
            _refuse(file, f"{name}.{key} takes a variable of this machine, which no task gets; write its value")
    return dict(given)


def _docker(folder: Path) -> tuple[str | None, tuple[tuple[Path, str], ...]]:
    """Return (working folder, files to copy) of a Dockerfile with only FROM, WORKDIR and COPY."""
    file = folder / "Dockerfile"
    lines = _text(file).replace("\\\n", " ").split("\n")
    for name in NOT_READ:
        if (folder / name).exists():
            _refuse(folder / name, "is not read here, without a container engine; remove the task")
    workdir: str | None = None
    copies: list[tuple[Path, str]] = []
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        kind = words[0].upper()
        if kind == "WORKDIR" and len(words) == 2:
            workdir = _place(file, words[1], workdir)
        elif kind == "COPY" and len(words) > 2 and not re.search(r"[-\[*?$\"'].*", words[1][:1]):
            copies += _copies(file, words[1:-1], words[-1], workdir, copies)
        elif kind != "FROM":
            _refuse(
                file, f"{line.strip()[:80]!r}: only FROM, WORKDIR and COPY of own files are done here, without a "
                "container engine; remove the task"
            )  # fmt: skip
    return workdir, tuple(copies)


def _copies(
    file: Path, sources: list[str], target: str, workdir: str | None, before: list[tuple[Path, str]]
) -> Iterator[tuple[Path, str]]:
    """Return a COPY's (source, target) pairs: a folder's contents, or a file.

    Args:
        before: Pairs of the earlier lines, which have made folders.
    """
    place = _place(file, target, workdir)
    for name in sources:
        source = Path(os.path.normpath(file.parent / name.lstrip("/")))
        if not source.exists() or not source.resolve().is_relative_to(file.parent):
            _refuse(file, f"COPY {name}: is no file or folder of {file.parent}; name one, without wildcards")
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1 or _is_made(place, workdir, before)
        if source.is_file() and not into and place.count("/") == 1:
            _refuse(file, f"COPY {name}: {target} would be a file in /, which is read-only here; use a folder")
        yield source, f"{place}/{source.name}" if source.is_file() and into else place


def _is_made(place: str, workdir: str | None, before: list[tuple[Path, str]]) -> bool:
    """Return True for a folder created by earlier lines of a Dockerfile."""
    above = PurePosixPath(place)
    if workdir is not None and PurePosixPath(workdir).is_relative_to(above):
        return True
    for source, target in before:
        made = PurePosixPath(target)
        if made.is_relative_to(above) and (made != above or source.is_dir()):
            return True
        if above.is_relative_to(made) and (source / above.relative_to(made)).is_dir():
            return True
    return False


def _place(file: Path, path: str, workdir: str | None) -> str:
    """Absolute path in the sandbox, in a folder of / that a task may have."""
    if not path.startswith("/") and workdir is None:
        _refuse(file, f"{path!r} is relative, and no WORKDIR comes before it; write an absolute path")
    place = os.path.normpath(PurePosixPath(workdir or "/", path))
    first = place.split("/")[1]
    if not first or first in SYSTEM or "$" in place or "\0" in place:
        _refuse(file, f"{path!r} is in the system, which is read-only here; use a folder such as /app")
    return place
