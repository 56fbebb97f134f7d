"""A PostgreSQL server of the job's own (``store.url=job://postgres``): up as long as the job.

The data outlive the job, however it ends: the next start uses them. They are in the run's directory, or on a local disk
while the server is up (``local_disk.py``). It listens only on the job's address and loopback, with a password derived
from the job's key. Processes log in as a role that is no superuser, so they cannot make the server run programs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import hmac
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from sqlalchemy.engine import URL, make_url

from megarl.buffer.store import OWN_SERVER, check_url
from megarl.core.errors import ConfigError, JobError
from megarl.core.processes.machine import die_with
from megarl.engines.client.leftovers import shared_memory
from megarl.run.local_disk import Parking, Use
from megarl.run.process import ports

log = logging.getLogger(__name__)

DEBIAN = Path("/usr/lib/postgresql")
NAME = "megarl"
"""Name of role and database."""
ADDRESS = "address"
"""File with HOST:PORT of the last started server."""
SETTINGS = {
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # /dev/shm segments would outlive a killed server
    "wal_level": "minimal",  # no replicas
    "max_wal_senders": "0",
    "logging_collector": "off",
}
INITDB = ("--username=postgres", "--auth=reject", "--encoding=UTF8", "--locale=C", "--no-instructions")
ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "TZ")
"""Variables that PostgreSQL's processes inherit."""
START_S = 300.0
"""Seconds until a server has recovered from a kill; also the limit of each program that prepares the data."""
LOCK_S = 60.0
STOP_S = 60.0
TAIL_LINES = 15
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER = 0x10000000
_NOBODY = 65534


class Identity(NamedTuple):
    """User that the server runs as, since PostgreSQL refuses to run as root."""

    name: str
    uid: int
    """Owner of its files."""
    options: dict[str, Any]
    """Options for ``subprocess``."""


def url_of(key: str, host: str, port: int | None) -> str:
    """Return the URL of a job's own server, with the password derived from the job's key."""
    password = hmac.new(key.encode(), b"megarl postgres", hashlib.sha256).hexdigest()
    # Refuse a server that asks for the plain password: it is not ours, but listens on our port.
    query = {"require_auth": "scram-sha-256"}
    return URL.create("postgresql+psycopg", NAME, password, host, port, NAME, query).render_as_string(
        hide_password=False
    )


class Server:
    """The job's PostgreSQL server. Its processes hold a lock in ``folder``: no second server starts there, on any node,
    while one of them is alive. ``folder`` also has the log, and the data unless they are on ``disk``.

    Args:
        key: The job's key; it may change between starts.
        port: None chooses a free port at the first start and keeps it.
        settings: PostgreSQL settings in addition to ``SETTINGS``.
        held: Open descriptors that the server's processes inherit.
        disk: Folder on a local disk for the data while the server is up; None leaves them in ``folder``.
        use: Purpose of the server; decides what happens if the data are on another host (``local_disk.py``).
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        connections: int = 100,
        settings: Mapping[str, str] | None = None,
        held: Sequence[int] = (),
        disk: Path | None = None,
        use: Use = "job",
    ) -> None:
        self.folder = folder.absolute()
        self.parking = Parking(self.folder, disk, use)
        self.log = self.folder / "server.log"
        self.host, self.port = host, port
        self._key, self._held = key, list(held)
        self._settings = {
            "max_connections": str(connections + 5),
            **SETTINGS,
            **(settings or {}),
        }  # 3 are reserved for the superuser
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for ``Store``, with the password: put it into environments, never into files."""
        return url_of(self._key, self.host, self.port)

    @property
    def data(self) -> Path:
        """Folder of PostgreSQL's files."""
        return self.parking.folder / "data"

    @property
    def _password(self) -> str:
        return str(make_url(self.url).password)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def poll(self) -> int | None:
        """Return the server's exit status; None while it runs. A dead server can be started again on the same port."""
        assert self._process is not None, "not started"
        return self._process.poll()

    def start(self) -> None:
        """Start the server, create its data if there are none, and return when it accepts connections. It ends with
        this process.

        Raises:
            ConfigError: PostgreSQL is not installed, or not in the data's version; only root could run it; or another
                server uses the data.
            JobError: the server does not start; the message has its last lines.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.parking.let_go()
        with _locked(self.folder) as lock:
            programs = find_server(self.parking.version())
            self.parking.take()
            identity = identity_of(self.parking.folder)
            keep = [lock.fileno(), *self._held]
            run = partial(self._run, identity, keep)
            login = f"ALTER ROLE {NAME} LOGIN PASSWORD '{self._password}'\n"
            if (self.data / "PG_VERSION").exists():
                _give(self.data, identity.uid)
            else:
                self._make(programs, run)
            # The file of a killed server: a running one would still have the lock.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (self.data / "pg_hba.conf").write_text("host all all all scram-sha-256\n")
            run(self._single(programs, self.data), login)
            if self.port is None:
                self.port = ports.choose(self.host, 1, None)[0]
            addresses = ",".join(dict.fromkeys([self.host, "127.0.0.1"]))
            settings = {"listen_addresses": addresses, "port": str(self.port), **self._settings}
            options = [f"--{name}={value}" for name, value in settings.items()]
            argv = [str(programs / "postgres"), "-D", str(self.data), *options]
            with self.log.open("ab") as output:
                self._process = subprocess.Popen[bytes](
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.parking.folder,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the job: the trainer must save before this server ends
                    pass_fds=keep,
                    **_ending_with_us(identity.options, signal.SIGINT),
                )
            self.parking.hold(lock)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        (self.folder / ADDRESS).write_text(f"{self.host}:{self.port}")
        log.info(
            "PostgreSQL on %s:%d (pid %d, as %s), data in %s", self.host, self.port, self.pid, identity.name, self.data
        )

    def stop(self) -> None:
        """Shut down in order: open transactions are rolled back, the files are complete. Then park the data."""
        if self._process is None:
            return
        for number, grace_s in ((signal.SIGINT, STOP_S), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                if self._process.poll() is None:
                    self._process.send_signal(number)
                self._process.wait(grace_s)
                break
        self.parking.park(in_order=self._process.poll() == 0)

    def _make(self, programs: Path, run: Callable[..., None]) -> None:
        """Create the data with a role that cannot log in yet, and its database; rename them when complete."""
        new = self.parking.folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        # The superuser has no password, so it cannot log in; only ``_single`` uses it.
        unsafe = ["--no-sync"] if self._settings.get("fsync") == "off" else []
        run([programs / "initdb", "-D", new, *INITDB, *unsafe])
        run(self._single(programs, new), f"CREATE ROLE {NAME}\nCREATE DATABASE {NAME} OWNER {NAME}\n")
        new.rename(self.data)

    def _single(self, programs: Path, data: Path) -> list[str | Path]:
        """Return the command of a server without a port, which runs its input as superuser before clients can
        connect."""
        settings = {**self._settings, "exit_on_error": "on", "log_min_error_statement": "panic"}
        return [
            programs / "postgres",
            "--single",
            "-D",
            data,
            *(w for name, value in settings.items() for w in ("-c", f"{name}={value}")),
            "postgres",
        ]

    def _run(self, identity: Identity, keep: Sequence[int], argv: list[str | Path], text: str = "") -> None:
        """Run a program. Raises JobError with its last lines if it fails or exceeds its time limit."""
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.parking.folder,
            env=_environment(),
            start_new_session=True,
            pass_fds=keep,
            **_ending_with_us(identity.options, signal.SIGKILL),
        )
        try:
            output, _ = process.communicate(text, timeout=START_S)
        except BaseException as error:
            kill_session(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise JobError(
                f"{argv[0]} has not ended after {START_S:g} s in {self.parking.folder}; look whether that file system "
                "responds"
            ) from None
        if process.returncode != 0:
            said = output.replace(self._password, "***")
            raise JobError(f"{argv[0]} ended with status {process.returncode} in {self.parking.folder}:\n{_tail(said)}")

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                check_url(self.url)
                return
            except ConfigError as error:
                late = time.monotonic() > deadline
                if self.poll() is not None or late:
                    ending = (
                        f"does not answer after {START_S:g} s ({error})" if late else f"ended with status {self.poll()}"
                    )
                    said = _tail(self.log.read_text(errors="replace"))
                    raise JobError(f"the job's PostgreSQL {ending}; its last lines ({self.log}):\n{said}") from None
                time.sleep(0.05)


def find_server(version: str | None = None) -> Path:
    """Return the folder of PostgreSQL's ``initdb`` and ``postgres``: from PATH, else the newest of Debian's.
    ``version``: major version that made the data; other versions cannot read them.

    Raises ConfigError if PostgreSQL is not installed.
    """
    debian = sorted(DEBIAN.glob("*/bin"), key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))], reverse=True)
    in_path = shutil.which("initdb")
    folders = [*([Path(in_path).resolve().parent] if in_path else []), *debian]
    found = {p: _version(p) for p in folders if all(os.access(p / name, os.X_OK) for name in ("initdb", "postgres"))}
    for folder, major in found.items():
        if version in (None, major):
            return folder
    fix = (
        "install it (Debian: apt install postgresql; without root: conda-forge's) or add it to PATH on the node that "
        "runs the supervisor, or set "
        "store.url to a server of yours"
    )
    if found:
        raise ConfigError(
            f"store.url={OWN_SERVER}: the run's data are PostgreSQL {version}'s, here is {', '.join(found.values())}; "
            f"{fix}"
        )
    raise ConfigError(
        f"store.url={OWN_SERVER} needs PostgreSQL's server, and initdb is neither in PATH nor in {DEBIAN}; {fix}"
    )


def _version(folder: Path) -> str:
    """Return PostgreSQL's major version."""
    try:
        program: list[str | Path] = [folder / "postgres", "--version"]
        said = subprocess.run(program, capture_output=True, text=True, env=_environment(), timeout=LOCK_S).stdout
    except subprocess.TimeoutExpired:
        return "?"
    number = re.search(r"\d+", said)
    return number[0] if number else "?"


def _environment() -> dict[str, str]:
    """Return the variables that PostgreSQL needs: no key of the job or of its user."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"LC_ALL": "C"}


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a session leader and its children; remove their shared memory."""
    segments = shared_memory(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for path in segments:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[IO[bytes]]:
    """Lock the folder until the block ends and all processes that inherited the descriptor have ended."""
    deadline = time.monotonic() + LOCK_S
    with (folder / "lock").open("ab") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{folder} is in use by another PostgreSQL server, of an earlier start of this job or on "
                        "another node; end that one"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                raise ConfigError(
                    f"{folder}/lock cannot be locked ({error.strerror}), so two servers could ruin the data; put "
                    "run.dir on a file system with flock, or set store.url to a server of yours"
                ) from error
        yield handle


def identity_of(folder: Path) -> Identity:
    """Return a user for the server that can write in ``folder``; root only under another number, in a user namespace.

    Raises ConfigError if this process is root and no other user can.
    """
    if os.geteuid() != 0:
        return Identity(pwd_name(os.geteuid()), os.geteuid(), {})
    candidates = [
        Identity(entry.pw_name, entry.pw_uid, {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []})
        for entry in pwd.getpwall()
        if entry.pw_name in ("postgres", "nobody")
    ]
    candidates.sort(key=lambda identity: identity.name, reverse=True)  # postgres first: other programs run as nobody
    # A user namespace maps root to another number: for containers with one user, and a run.dir that only root can
    # enter.
    candidates.append(Identity("root under another number", 0, {"preexec_fn": rename_root}))
    for identity in candidates:
        _give(folder, identity.uid)
        with suppress(OSError, subprocess.SubprocessError):
            probe = 'test "$(id -u)" != 0 && test -w "$0" && cd "$0"'
            argv = ["/bin/sh", "-c", probe, str(folder)]
            done = subprocess.run(
                argv, cwd="/", env=_environment(), capture_output=True, timeout=LOCK_S, **identity.options
            )
            if done.returncode == 0:
                return identity
    raise ConfigError(
        f"store.url={OWN_SERVER}: PostgreSQL refuses to run as root, and here neither the users postgres and nobody "
        f"can (they must be able to enter {folder}) nor root in a user namespace; run the job as another user, put "
        "run.dir where others may enter, or set store.url to a server of yours"
    )


def pwd_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def rename_root() -> None:
    """Turn the child process into uid 65534 of a new user namespace, with root's files and without root's rights."""
    if _LIBC.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} 0 1"), ("gid_map", f"{_NOBODY} 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _ending_with_us(options: dict[str, Any], number: signal.Signals) -> dict[str, Any]:
    """Return Popen options with which the process gets this signal when its parent dies."""
    before, parent = options.get("preexec_fn"), os.getpid()

    def prepare() -> None:
        if before is not None:
            before()
        die_with(parent, number)  # last: changing the user would reset it

    return {**options, "preexec_fn": prepare}


def _give(folder: Path, uid: int) -> None:
    """Make ``uid`` the owner of a folder and all files in it."""
    if not folder.exists() or os.geteuid() != 0 or folder.stat().st_uid == uid:
        return
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            os.chown(os.path.join(parent, name), uid, -1, follow_symlinks=False)
    os.chown(folder, uid, -1)  # last: the folder's owner marks that all files are done


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:]) or "(it printed nothing)"
