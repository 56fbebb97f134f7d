"""Process 1 of a sandbox: starts each test in a separate process, enforces its limits, and reports its end.

It cannot be killed from inside (it is the namespace's init) or read (not dumpable), and no other process has its link
to the outside. When the link closes, it ends with everything in the sandbox. A zygote has executed this module before,
and its child calls ``serve``; without a zygote it starts as
``exec(code["launcher"], {"code": code, "link": descriptor, "passed": descriptor or -1})``.
"""

from __future__ import annotations

import _ctypes
import _signal as signal  # type: ignore[import-not-found]  # without the enums of ``signal``
import _sitebuiltins
import builtins
import gc
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # imports that each start would pay for: typing, types and contextlib take as long as all the others
    from types import CodeType
    from typing import Any

ModuleType = type(sys)

HEAD = struct.Struct("<iBBddIII")
"""exit code, index in LIMITS, leftovers (bool), seconds, cpu_s, bytes of the stdout, stderr and value that follow."""
LIMITS = ("", "wall", "cpu", "memory", "output", "processes", "file")
STDERR_BYTES = 4096
WATCH_S = 0.05
PR_SET_DUMPABLE = 4
TMP = ("/tmp", "/dev/shm")
INODE_BYTES = 1024
"""Kernel memory in bytes of a tmpfs file besides its content, including its attributes."""
MODULES = ("values", "answer", "checker")
LINK, VALUE = 3, 4
"""Descriptors of a test's process: the link between program and tests, and where a value is written."""
STREAMS = (("stdin", "r", "surrogateescape"), ("stdout", "w", "surrogateescape"), ("stderr", "w", "backslashreplace"))


def set_dumpable(value: int) -> None:
    """Call prctl, without the slow import of ``ctypes``."""
    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None: this program itself
    _ctypes.call_function(function, (PR_SET_DUMPABLE, value, 0, 0, 0))


def unnamed_file(content: bytes = b"") -> int:
    descriptor = os.open("/tmp", os.O_RDWR | os.O_TMPFILE, 0o600)
    if content:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def load(code: dict[str, CodeType]) -> dict[str, Any]:
    """Execute once the modules that tests' processes may need, without leaving them in ``sys.modules``."""
    made = {}
    for name in MODULES:
        sys.modules[name] = made[name] = ModuleType(name)
        exec(code[name], made[name].__dict__)
    for name in MODULES:
        del sys.modules[name]
    return made


def rehearse(ready: dict[str, Any]) -> None:
    """Run a small test, so that Python's first-use caches exist before the forks."""
    values = ready["values"]
    for _ in range(3):
        names: dict[str, Any] = {}
        exec(compile("def f(x):\n    return x + 1\nassert f(1) == 2", "solution.py", "exec", dont_inherit=True), names)
        values.decode(values.loads(values.dumps(values.encode([1, "a", {2: (3.0, None)}]))))
        file = unnamed_file(b"x")
        for mode in ("r", "w"):
            with open(file, mode, encoding="utf-8", errors="surrogateescape", closefd=False) as stream:
                stream.flush()
        content(file, 10)
        os.close(file)
        is_clean()
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.poll(0)
        marshal.loads(marshal.dumps({"a": [1, "b", 2.0]}, 2))
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
        ready["answer"]._Objects(names).perform({"do": "names", "names": ["f"]})


def module(name: str, ready: dict[str, Any]) -> Any:
    sys.modules[name] = ready[name]
    return ready[name]


def limit_myself(limits: dict[str, Any]) -> None:
    """Set the limits, or keep lower existing ones, which only root can raise."""
    for which, soft, more in (
        (resource.RLIMIT_AS, limits["address_space_bytes"], 0),
        (resource.RLIMIT_NPROC, limits["processes"], 0),
        (resource.RLIMIT_FSIZE, max(limits["file_bytes"], limits["output_bytes"] + 1), 0),
        (resource.RLIMIT_NOFILE, limits["open_files"], 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"], 1),  # SIGXCPU, and a second later SIGKILL for those that ignore it
    ):
        most = resource.getrlimit(which)[1]
        bound = [value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, soft + more)]
        resource.setrlimit(which, (bound[0], bound[1]))


def first_to_go() -> None:
    """Make this process the first to be killed if the machine runs out of memory."""
    try:  # noqa: SIM105
        with open("/proc/self/oom_score_adj", "wb", 0) as file:
            file.write(b"1000")
    except OSError:
        pass  # best effort; the limits do not depend on it


def become_a_program(files: dict[int, int]) -> None:
    """Keep only these descriptors (number -> source), with new standard streams and a new session."""
    os.setsid()
    for number, descriptor in files.items():
        os.dup2(descriptor, number)  # all of them are above: see `serve`
    if LINK not in files:
        os.closerange(LINK, LINK + 1)  # which ignores that it may be closed
    os.closerange(VALUE + 1, 4096)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for i, (name, mode, errors) in enumerate(STREAMS):
        stream = open(i, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_program(source: str, name: str) -> dict[str, Any]:
    """Execute the program as the module ``name`` and return its names."""
    main = ModuleType(name)
    sys.modules["__main__"] = sys.modules[name] = main
    main.__dict__["__builtins__"] = builtins
    sys.argv = ["solution.py"]
    exec(compile(source, "solution.py", "exec", dont_inherit=True), main.__dict__)
    return main.__dict__


def work(job: dict[str, Any], test: dict[str, Any], ready: dict[str, Any]) -> None:
    """Run in a test's process: the program, then the test."""
    if job["kind"] == "check":
        values = module("values", ready)
        checks = {name: job[name] for name in ("tests", "setup", "entry", "asked", "library")}
        verdict = module("checker", ready).check(**checks, times=job["times"], channel=LINK)
        os.write(VALUE, values.dumps(verdict).encode())
    elif job["kind"] == "answer":
        module("values", ready)
        answer = module("answer", ready)
        answer.serve(run_program(job["program"], "solution"), LINK)
    elif test["call"] is None:
        run_program(job["program"], "__main__")
    else:
        module("values", ready)
        answer = module("answer", ready)
        answer.call(run_program(job["program"], "solution"), *test["call"], VALUE)


def end(error: BaseException | None) -> int:
    """Do what the interpreter does at exit, except its slow teardown, and return the exit code."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 1 and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        error.__traceback__ = None  # it holds the frames' variables
    elif error is not None:
        code = 1
        frames = error.__traceback__
        for _ in range(3):  # work, run_program, exec: ours
            frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    import atexit  # builtin

    atexit._run_exitfuncs()
    code = code or 120 * flush(sys.stdout)
    sys.modules[
        "__main__"
    ].__dict__.clear()  # files that the program opened on stdout and did not close write what they hold
    flush(sys.__stdout__)
    flush(sys.stderr)
    return code & 0xFF


def flush(stream: Any) -> bool:
    """Flush a stream; return True if it failed. A program may have closed or replaced its streams."""
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except Exception:
        return True
    return False


def child(job: dict[str, Any], test: dict[str, Any], ready: dict[str, Any], files: dict[int, int]) -> None:
    """Run one test in a forked process; never returns."""
    status = 1
    try:
        become_a_program(files)
        limit_myself(job["limits"])
        set_dumpable(1)
        first_to_go()
        gc.enable()
        try:
            work(job, test, ready)
            error: BaseException | None = None
        except BaseException as raised:
            error = raised
        status = end(error)
    finally:
        os._exit(status)


def tree_bytes() -> int:
    """Return the resident bytes of all other processes in the sandbox; shared pages count for each."""
    total = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            try:
                with open(f"/proc/{entry}/statm", "rb") as file:
                    total += int(file.read().split()[1])
            except (OSError, IndexError):  # it has just ended
                continue
    return total * resource.getpagesize()


def inode_bytes() -> int:
    """Return the kernel memory of files besides their contents: a program can create millions of empty files."""
    found = [os.statvfs(path) for path in TMP]
    return INODE_BYTES * sum(place.f_files - place.f_ffree for place in found)


def watch(process: int, wall_s: float, memory_bytes: int, watch_s: float) -> str:
    """Wait for a process's end or a limit, checking memory every ``watch_s`` seconds; return the limit's name or
    ``""``."""
    deadline = time.monotonic() + wall_s
    descriptor = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "wall"
            if poll.poll(1000 * min(left, watch_s)):
                return ""
            if tree_bytes() + inode_bytes() > memory_bytes:
                return "memory"
    finally:
        os.close(descriptor)


def kill_all(process: int) -> tuple[int, float]:
    """Kill every other process of the namespace. Returns the status and CPU seconds of ``process``.

    The kernel refuses forks of a signalled process, so one call is enough.
    """
    status, cpu_s = 0, 0.0
    ended, found, usage = os.wait4(process, os.WNOHANG)
    try:  # noqa: SIM105
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        try:
            if ended == process:
                status, cpu_s = os.waitstatus_to_exitcode(found), usage.ru_utime + usage.ru_stime
            ended, found, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, cpu_s


def last_words(stderr: bytes) -> str:
    """Return the limit named in a failed program's last error line."""
    line = stderr.strip().rpartition(b"\n")[2]
    if line.startswith(b"MemoryError"):
        return "memory"
    if b"[Errno 11]" in line or b"can't start new thread" in line:
        return "processes"
    if b"[Errno 27]" in line or b"[Errno 28]" in line:
        return "file"
    return ""


def content(descriptor: int, limit: int, from_end: bool = False) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, limit, max(0, size - limit) if from_end else 0)


def is_clean() -> bool:
    try:
        return all(not os.listdir(path) and stat.S_IMODE(os.stat(path).st_mode) == 0o755 for path in TMP)
    except OSError:  # made unreadable
        return False


def run_test(job: dict[str, Any], test: dict[str, Any], ready: dict[str, Any], passed: int) -> bytes:
    limits = job["limits"]
    files = {0: unnamed_file(test["stdin"]), 1: unnamed_file(), 2: unnamed_file(), VALUE: unnamed_file()}
    opened = list(files.values())
    if job["kind"] != "test":
        files[LINK] = passed
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        child(job, test, ready, files)
    if job["kind"] == "answer":
        os.close(
            passed
        )  # so that the tests see it when the program ends; the program, if it is still there, is killed when they have
    limit = watch(process, test["wall_s"], limits["memory_bytes"], job.get("watch_s", WATCH_S))
    seconds = time.monotonic() - start
    status, cpu_s = kill_all(process)
    size = os.fstat(files[1]).st_size
    if not limit and (status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_s >= limits["cpu_s"])):
        limit = "cpu"
    if not limit and max(size, os.fstat(files[VALUE]).st_size) > limits["output_bytes"]:
        limit = "output"
    stderr = content(files[2], STDERR_BYTES, from_end=True)
    if not limit and status != 0:
        limit = last_words(stderr) or (
            "" if os.statvfs("/tmp").f_bavail else "file"
        )  # full: then there are no last words
    stdout = content(files[1], limits["output_bytes"])
    value = content(files[VALUE], limits["output_bytes"])
    for descriptor in opened:
        os.close(descriptor)
    used = job["kind"] != "test" or not is_clean()
    head = HEAD.pack(status, LIMITS.index(limit), used, seconds, cpu_s, len(stdout), len(stderr), len(value))
    return head + stdout + stderr + value


def serve(ready: dict[str, Any], link: int, passed: int) -> None:
    """Run the launcher. ``ready``: result of ``load``; ``passed``: descriptor connecting a program and its tests, or
    -1."""
    if os.getpid() != 1:  # `kill_all` would end whatever it may outside of a namespace of our own
        sys.exit("the launcher is not process 1 of a pid namespace")
    set_dumpable(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of all signals from inside, process 1 gets those that it handles
    builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", ""), _sitebuiltins.Quitter("quit", "")  # type: ignore[assignment]
    sys.path[:] = [path for path in sys.path if path] + [path for path in ("/python/site",) if os.path.isdir(path)]
    for _ in range(16):  # what is opened later lies above the numbers that a test's process gets
        os.dup(0)
    requests = open(link, "rb", closefd=False)  # noqa: SIM115
    gc.disable()
    gc.freeze()
    os.write(link, b"R")
    try:
        job = marshal.load(requests)
        if passed >= 0:
            low, passed = passed, os.dup(passed)
            os.close(low)
        while True:
            data = run_test(job, marshal.load(requests), ready, passed)
            while data:
                data = data[os.write(link, data) :]
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    os._exit(0)


if "link" in globals():
    serve(load(globals()["code"]), globals()["link"], globals()["passed"])
