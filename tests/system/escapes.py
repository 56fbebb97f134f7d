"""Hostile programs. Text only: nothing in this file is ever executed but inside the sandbox, by ``escape_runner``.

``{secret}``: a file of the host that anyone may read; ``{port}``: of a listener on the host's loopback; ``{name}``: of
    an abstract socket of
the host; ``{pid}``: of a process of the host; ``{needle}``: the expected output, which the program is not given (its
two halves are).
"""

from __future__ import annotations

from typing import Any, NamedTuple

LIBC = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTEMPT = """
def attempt(action, *arguments):
    try:
        action(*arguments)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        return
    print("ESCAPED", action, arguments)
def write(path, text):
    with open(path, "wb", 0) as file:
        file.write(text.encode())
"""
REFUSED = (
    "def refused(number, *arguments):\n    if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() not in "
    "(errno.EPERM, errno.ENOSYS):\n        print('ESCAPED', number)\n"
)


class Escape(NamedTuple):
    name: str
    program: str
    row: Any
    status: str = "ok"
    """``ok``: what the program tries is refused, and it says so. ``wrong``: it is stopped, or its forgery is not
    believed."""
    reason: str = ""
    """Must occur in the verdict's reason."""


def remembered(name: str, program: str, *tests: str) -> Escape:
    """What the program, or the tests of its row, leave behind for the next item, which ``NEXT`` looks for."""
    return Escape(name, program + "\ndef f(x):\n    return x\n", {"test_list": ["assert f(1) == 1", *tests]})


def blocked(name: str, program: str) -> Escape:
    """The program prints ESCAPED for what succeeds, and ``done`` at the end."""
    return Escape(name, ATTEMPT + program + "\nprint('done')\n", {"inputs": [""], "outputs": ["done"]})


def syscalls(name: str, *calls: str) -> Escape:
    return blocked(name, LIBC + REFUSED + "\n".join(f"refused({call})" for call in calls))


def stopped(name: str, program: str, reason: str = "limit") -> Escape:
    """The program would print the right answer, if it came to that."""
    return Escape(name, program + "\nprint('done')\n", {"inputs": [""], "outputs": ["done"]}, "wrong", reason)


def forged(name: str, program: str, row: Any) -> Escape:
    return Escape(name, program, row, "wrong")


CATCH = "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"
ASSERT = {"test_list": ["assert f(1) == 'needle-4711'", "assert f(2) != f(1)", "assert set(f(3)) == set([8, 9])"]}
CALL = {"fn_name": "f", "inputs": [[1], [2]], "outputs": ["needle-4711", "needle-4712"]}
PRINT = {"inputs": ["1\n", "2\n"], "outputs": ["needle-4711\n", "needle-4712\n"]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(1) == 'needle-4711'\n    assert len(candidate(2)) == 3\n",
    "entry_point": "f",
}
CLOSE = {"test_list": ["import math\nassert math.isclose(f(1), 47.11)", "assert abs(f(2) - 47.12) < 1e-9"]}
LOOPS = {
    "test_list": [
        "for a, b in zip(map(f, [1, 2]), [5, 6]):\n    assert a == b",
        "assert all(map(lambda c: f(c) == 'needle-4711', [1, 2]))",
        "assert next((x for x in map(f, [1]) if x != 'needle-4711'), None) is None",
        "for x in filter(lambda c: f(c) != 'needle-4711', [1]):\n    assert False",
        "assert not [x for x in iter(lambda: f(1), 'needle-4711')]",
        "import itertools\nassert list(itertools.starmap(f, [(1,), (2,)])) is not None and f(1) == 'needle-4711'",
    ]
}
LOOP_CHECK = {
    "test": "def check(candidate):\n    for got, want in zip(map(candidate, [1, 2]), ['needle-4711', 8]):\n        "
    "assert got == want\n",
    "entry_point": "f",
}
EXPECTS = {
    "test_list": [
        "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)",
        CATCH,
    ]
}
ENDS = (
    "StopIteration",
    "StopIteration('needle-4711')",
    "StopAsyncIteration",
    "GeneratorExit",
    "SystemExit(0)",
    "KeyboardInterrupt",
)
OBJECT = {
    "test_list": [
        "for a in map(lambda c: f(c)[0], [1]):\n    assert a == 1",
        "assert all(map(lambda c: len(f(c)) == 2, [1]))",
        "for a in map(lambda c: f(c).value, [1]):\n    assert a == 1",
        "for a in map(lambda c: list(f(c)), [1]):\n    assert a == [1]",
        "for a in map(lambda c: str(f(c)), [1]):\n    assert a == 'needle-4711'",
    ]
}
FORGED_RAISE = """
import os
def f(x):
    data = b'{"raised": ["KIND", "KIND"], "message": "needle"}'
    for _ in range(100):
        os.write(3, len(data).to_bytes(4, "little") + data)
"""
SEARCH = """
import gc, sys
def search():
    want = "need" + "le-47"
    seen = []
    frame = sys._getframe()
    while frame:
        seen += [repr(frame.f_locals), repr(list(frame.f_globals))]
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, bytes, list, tuple, dict)):
            try:
                seen.append(repr(thing)[:10000])
            except Exception:
                pass
    for text in seen:
        at = text.find(want)
        while at >= 0:
            if text[at:at + 11][7:].isdigit():
                return text[at:at + 11]
            at = text.find(want, at + 1)
    return "nothing"
"""
MEMORY = """
import re
def search():
    want = re.compile(b"need" + b"le-47[0-9][0-9]")
    for line in open("/proc/self/maps"):
        span, mode = line.split()[:2]
        if mode[0] == "r" and "[v" not in line:
            low, high = (int(x, 16) for x in span.split("-"))
            if high - low < 2**27:
                with open("/proc/self/mem", "rb", 0) as memory:
                    try:
                        memory.seek(low)
                        found = want.search(memory.read(high - low))
                    except OSError:
                        continue
                if found:
                    return found.group().decode()
    return "nothing"
"""
FRAMES = """
import json, os, struct
def frame(value):
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "little") + data
verdict = json.dumps({"passed": [True] * 3, "reasons": [""] * 3, "row_error": None}).encode()
ok = struct.pack("<iBBddIII", 0, 0, 0, 0.1, 0.1, 12, 0, len(verdict)) + b"needle-4711\\n" + verdict
for number in range(1, 64):
    for data in (ok, verdict, frame({"value": {"f": "needle-4711"}}), frame({"value": True})):
        try:
            os.write(number, data)
        except OSError:
            pass
"""
ALWAYS_EQUAL = """
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __len__(self): return 3
    def __bool__(self): return True
    def __iter__(self): return iter([8, 9])
    def __sub__(self, other): return 0.0
    def __float__(self): return 47.11
    __class__ = str
def f(x):
    return Equal("x")
"""

SEEN = """
import os, resource, socket
def f():
    def lines(path):
        return open(path).read().splitlines()[1:]
    left = os.listdir("/tmp") + os.listdir("/dev/shm")
    pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
    sockets = [path for path in ("/proc/net/tcp", "/proc/net/udp") if lines(path)]
    sockets += [line for line in lines("/proc/net/unix") if "@" in line]
    with socket.create_server(("127.0.0.1", 5000)):
        pass
    room = os.statvfs("/tmp")
    niceness = os.getpriority(os.PRIO_PROCESS, 1) == os.getpriority(os.PRIO_PROCESS, 0)
    cores = len(os.sched_getaffinity(1)) == len(os.sched_getaffinity(0))
    return [left, pids, sockets, room.f_bavail == room.f_blocks, niceness, cores]
def g(x):
    return len(x)
"""
NEXT = {
    "test_list": [
        "assert f() == [[], [], [], True, True, True]",
        "import os\nassert os.listdir('/tmp') + os.listdir('/dev/shm') == []\nassert {int(p) for p in "
        "os.listdir('/proc') if p.isdigit()} == {1, os.getpid()}",
        "assert len([1, 2]) == g([1, 2]) == 2 and not hasattr(os, 'left')",
    ]
}
"""The item after each escape: both sandboxes, the program's and the tests', are as new."""
STATE = (
    "import builtins, os, sys\nbuiltins.len = lambda x: 7\nos.left = 1\nsys.modules['json'] = os\nos.environ['LEFT'] = "
    "'x'"
)
FILES = (
    "import os\nfor folder in ('/tmp', '/dev/shm'):\n    os.mkdir(folder + '/left')\n    open(folder + '/left/x', "
    "'w').write('x')\n    os.chmod(folder, 0)"
)
DAEMON = (
    "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for n in range(1, "
    "32):\n            if n not in (9, 19):\n                signal.signal(n, signal.SIG_IGN)\n        while True:\n   "
    "         time.sleep(1)\n    os._exit(0)"
)
NET = (
    "import socket\nheld = [socket.create_server(('127.0.0.1', port)) for port in range(5000, 5020)]\nfor i in "
    "range(20):\n    held.append(socket.socket(socket.AF_UNIX))\n    held[-1].bind(chr(0) + f'left{i}')\nfor _ in "
    "range(5):\n    held.append(socket.create_connection(('127.0.0.1', 5000)))\n    held.append(held[0].accept()[0])\n "
    "   held[-1].close()"
)
FULL = (
    "import os\ndef fill(folder):\n    try:\n        for i in range(100):\n            with open(f'{folder}/{i}', "
    "'wb', 0) as file:\n                if file.write(bytes(2**20)) < 2**20:\n                    return\n    except "
    "OSError:\n        pass\nfill('/dev/shm')"
)
LOWER = (
    "import os, resource\nfor which in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, "
    "resource.RLIMIT_AS, resource.RLIMIT_CPU):\n    try:\n        resource.prlimit(1, which, (0, 0))\n    except "
    "OSError:\n        pass"
)
NICE = (
    "import os\nfor action in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.sched_setaffinity(1, "
    "{min(os.sched_getaffinity(0))}), lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))):\n    try:\n "
    "       action()\n    except OSError:\n        pass"
)

ESCAPES = [
    # from one item to the next, through what made its sandbox
    remembered("files for the next item, from the program", FILES),
    remembered("files for the next item, from the tests", "", FILES),
    remembered("a daemon beside the next item, from the program", DAEMON),
    remembered("a daemon beside the next item, from the tests", "", DAEMON),
    forged("changed modules for the next item, from the program", STATE + "\ndef f(x):\n    return 1", ASSERT),
    remembered("changed modules for the next item, from the tests", "", STATE),
    remembered("ports and names for the next item, from the program", NET),
    remembered("ports and names for the next item, from the tests", "", NET),
    remembered("no memory for the next item, from the program", FULL),
    remembered("no memory for the next item, from the tests", "", FULL),
    remembered("process 1 slowed down for the next item, from the program", NICE),
    remembered("process 1 slowed down for the next item, from the tests", "", NICE),
    forged("the limits of process 1 lowered, stdout", LOWER + "\nprint('needle-4711')", PRINT),
    forged("the limits of process 1 lowered, assertions", LOWER + "\ndef f(x):\n    return 1", ASSERT),
    Escape(
        "the limits of process 1 lowered, from the tests",
        "def f(x):\n    return x",
        {"test_list": ["assert f(1) == 1", LOWER + "\nassert f(1) == 2"]},
        "wrong",
    ),
    Escape(
        "tests that kill their own process",
        "def f(x):\n    return x",
        {"test_list": ["assert f(1) == 1", "import os\nos.kill(os.getpid(), 9)"]},
        "wrong",
        "signal 9",
    ),
    Escape(
        "tests that kill all they can",
        "def f(x):\n    return x",
        {
            "test_list": [
                "assert f(1) == 1",
                "import os\nos.kill(1, 9)\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass",
                "assert f(2) == 2",
            ]
        },
    ),
    blocked(
        "the sandbox around this one",
        "import os\nfor path in ('/proc/1/root', '/proc/1/cwd', '/proc/1/ns/mnt', '/proc/self/fd/3'):\n    "
        "attempt(os.stat if '/fd/' in path else os.listdir, path)\nif sorted(int(p) for p in os.listdir('/proc') if "
        "p.isdigit()) != [1, os.getpid()] or os.getppid() != 1:\n    print('ESCAPED')\nattempt(os.unlink, "
        "'/tmp/../tmp/.')\nif os.listdir('/tmp/..') != os.listdir('/'):\n    print('ESCAPED')",
    ),
    # the network
    blocked(
        "connect to the host's loopback", "import socket\nattempt(socket.create_connection, ('127.0.0.1', {port}), 2)"
    ),
    blocked(
        "send a datagram to the host's loopback",
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ntry:\n    s.sendto(b'x', ('127.0.0.1', "
        "{port}))\nexcept OSError:\n    pass",
    ),
    blocked(
        "connect to an abstract socket of the host",
        "import socket\ns = socket.socket(socket.AF_UNIX)\nattempt(s.connect, chr(0) + '{name}')",
    ),
    blocked("resolve a name", "import socket\nattempt(socket.getaddrinfo, 'localhost.localdomain.invalid', 80)"),
    blocked(
        "sockets of other families",
        "import socket\nfor family in (16, 17, 38, 40):\n    attempt(socket.socket, family, socket.SOCK_RAW)\n    "
        "attempt(socket.socket, family, socket.SOCK_STREAM)",
    ),
    blocked("raw sockets", "import socket\nattempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)"),
    # files
    blocked("read a file that anyone may read", "attempt(open, '{secret}')"),
    blocked(
        "read the host's accounts",
        "for path in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/etc/resolv.conf'):\n    attempt(open, path)",
    ),
    blocked(
        "list homes and work",
        "import os\nfor path in ('/home', '/root', '/work', '/etc', '/var', '/srv', '/mnt', "
        "'/opt', '/run', '/sys'):\n    attempt(os.listdir, path)",
    ),
    blocked(
        "write outside /tmp",
        "for path in ('/x', '/usr/x', '/usr/lib/x', '/python/lib/x', '/python/bin/python3', "
        "'/dev/x', '/proc/x'):\n    attempt(open, path, 'w')",
    ),
    blocked(
        "a symlink out of /tmp",
        "import os\nos.symlink('{secret}', '/tmp/a')\nattempt(open, '/tmp/a')\nos.symlink('/proc/1/root{secret}', "
        "'/tmp/b')\nattempt(open, '/tmp/b')\nos.symlink('../../../..{secret}', '/tmp/c')\nattempt(open, '/tmp/c')",
    ),
    blocked(
        "a hard link to a library",
        "import os\nattempt(os.link, os.__file__, '/tmp/os.py')\nattempt(os.chmod, os.__file__, 0o777)",
    ),
    blocked(
        "a renamed root",
        "import os\nattempt(os.rename, '/usr', '/tmp/usr')\nattempt(os.rmdir, '/python')\nattempt(os.chroot, '/tmp')",
    ),
    blocked(
        "device nodes",
        "import os, stat\nattempt(os.mknod, '/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))\nattempt(os.mknod, "
        "'/tmp/mem', stat.S_IFCHR | 0o666, os.makedev(1, 1))\nfor name in ('mem', 'kmsg', 'port', 'vda', 'sda', 'kvm', "
        "'fuse', 'net/tun', 'console'):\n    attempt(open, '/dev/' + name, 'rb')",
    ),
    blocked("the terminal", "attempt(open, '/dev/tty', 'w')"),
    # other processes
    blocked(
        "process 1 through /proc",
        "import os\nfor name in ('environ', 'mem', 'maps', 'fd/3', 'root/etc', 'cwd/x', 'syscall', 'auxv'):\n    "
        "attempt(open, '/proc/1/' + name, 'rb')\nattempt(os.listdir, '/proc/1/fd')\nattempt(open, '/proc/1/mem', 'wb')",
    ),
    blocked(
        "the host's processes",
        "import os\npids = [int(p) for p in os.listdir('/proc') if p.isdigit()]\nif max(pids) > 100 or {pid} in "
        "pids:\n    print('ESCAPED', pids)\nif {pid} > 2:\n    attempt(os.kill, {pid}, 0)",
    ),
    blocked(
        "kill process 1",
        "import os, time\nfor number in (9, 15, 19, 2, 11, 6):\n    os.kill(1, number)\ntime.sleep(0.05)\ntry:\n    "
        "os.kill(-1, 9)\nexcept ProcessLookupError:\n    pass",
    ),
    syscalls(
        "ptrace and other processes' memory",
        "101, 16, 1, 0, 0",
        "101, 0, 0, 0, 0",
        "310, 1, 0, 0, 0, 0, 0",
        "311, 1, 0, 0, 0, 0, 0",
        "438, 1, 3, 0",
    ),
    # the kernel
    syscalls(
        "namespaces",
        "272, 0x10000000",
        "272, 0x40000000",
        "272, 0x20000",
        "308, 0, 0",
        "56, 0x10000011, 0, 0, 0, 0",
        "435, 0, 0",
    ),
    syscalls(
        "mounts",
        "165, b'none', b'/tmp', b'tmpfs', 0, 0",
        "165, b'none', b'/', b'', 32 | 4096, 0",
        "166, b'/proc', 2",
        "155, b'/tmp', b'/tmp'",
        "430, b'tmpfs', 0",
        "428, -100, b'/', 1",
        "161, b'/tmp'",
    ),
    syscalls(
        "interfaces of the kernel",
        "321, 0, 0, 0",
        "298, 0, 0, -1, -1, 0",
        "323, 0",
        "425, 1, 0",
        "250, 0, 0",
        "248, b'user', b'x', 0, 0, 0",
        "175, 0, 0, b''",
        "246, 0, 0, 0",
        "304, 0, 0, 0",
        "135, 0x0040000",
    ),
    syscalls(
        "memory that no limit counts",
        "29, 0, 4096, 0o1600",
        "319, b'x', 0",
        "447, 0",
        "68, 0, 0o1600",
        "240, b'x', 0, 0, 0",
    ),
    syscalls("keys typed into a terminal", "16, 0, 0x5412, b'x'", "16, 0, 0x541C, b'x'"),
    blocked(
        "settings of the kernel",
        "for path in ('kernel/hostname', 'kernel/core_pattern', 'vm/overcommit_memory', 'kernel/modprobe', "
        "'fs/file-max'):\n    attempt(write, '/proc/sys/' + path, 'x')\nattempt(write, '/proc/sysrq-trigger', "
        "'h')\nfor name in ('kcore', 'kmsg'):\n    attempt(open, '/proc/' + name, 'rb')",
    ),
    blocked(
        "another user",
        "import os\nfor identity in (0, 1, 65534):\n    attempt(os.setuid, identity)\n    "
        "attempt(os.setgid, identity)\nattempt(os.setgroups, [0])\nattempt(write, "
        "'/proc/self/uid_map', '0 0 1')\nif os.getuid() == 0:\n    print('ESCAPED')",
    ),
    blocked(
        "higher limits",
        "import resource\nfor which in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, "
        "resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):\n    soft, hard = "
        "resource.getrlimit(which)\n    attempt(resource.setrlimit, which, (hard + 1, hard + "
        "1))\n    attempt(resource.setrlimit, which, (-1, -1))\nimport os\nattempt(os.nice, -5)",
    ),
    # what is around a test
    blocked(
        "the environment",
        "import os\nfor name in os.environ:\n    if name not in ('PATH', 'HOME', 'LANG', 'PYTHONHASHSEED', "
        "'PYTHONDONTWRITEBYTECODE', 'PYTHONHOME', 'LD_LIBRARY_PATH', 'PWD', 'LC_CTYPE') and 'THREADS' not in "
        "name:\n        print('ESCAPED', name)\nif os.path.expanduser('~') != '/tmp':\n    print('ESCAPED')",
    ),
    blocked(
        "inherited descriptors",
        "import os\nfor number in range(5, 4096):\n    try:\n        os.fstat(number)\n   "
        " except OSError:\n        continue\n    print('ESCAPED', number)",
    ),
    Escape(
        "files of another test",
        "import os\nprint(os.listdir('/tmp') + os.listdir('/dev/shm'))\nopen('/tmp/left', "
        "'w').write(input())\nopen('/dev/shm/left', 'w').write('x')",
        {"inputs": ["a", "b"], "outputs": ["[]", "[]"]},
    ),
    Escape(
        "/tmp made unusable for the next test",
        "import os\nprint(len(os.listdir('/tmp')))\nos.chmod('/tmp', 0)",
        {"inputs": ["a", "b", "c"], "outputs": ["0", "0", "0"]},
    ),
    Escape(
        "a daemon beside the next test",
        "import os, time\nprint([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())], "
        "flush=True)\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    "
        "os._exit(0)",
        {"inputs": ["a", "b"], "outputs": ["[]", "[]"]},
    ),
    Escape(
        "a daemon that holds stdout",
        "import os, signal, time\nprint('done', flush=True)\nfor n in range(1, 32):\n    if n not in (9, 19):\n        "
        "signal.signal(n, signal.SIG_IGN)\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while "
        "True:\n            time.sleep(1)\n    os._exit(0)",
        {"inputs": [""], "outputs": ["done"]},
    ),
    # limits
    stopped("fork bomb", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"),
    stopped(
        "fork bomb of daemons",
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    try:\n        if os.fork() "
        "== 0:\n            os.setsid()\n    except OSError:\n        pass",
    ),
    stopped(
        "thread bomb",
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "processes",
    ),
    stopped("memory bomb", "blocks = []\nfor _ in range(64):\n    blocks.append(bytearray(2**24))", "memory"),
    stopped(
        "memory bomb that ignores MemoryError",
        "blocks = []\nwhile True:\n    try:\n        blocks.append(bytearray(2**22))\n    except MemoryError:\n        "
        "pass",
    ),
    stopped(
        "memory bomb of several processes",
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        block = bytearray(100 * 2**20)\n        "
        "time.sleep(60)\ntime.sleep(60)",
        "memory",
    ),
    stopped(
        "disk flood",
        "for i in range(256):\n    with open(f'/tmp/{i}', 'wb') as file:\n        file.write(bytes(2**20))",
        "file",
    ),
    stopped(
        "a file that is too large",
        "with open('/tmp/x', 'wb') as file:\n    for _ in range(64):\n        file.write(bytes(2**20))",
        "file",
    ),
    stopped("a sparse file that is too large", "with open('/tmp/x', 'wb') as file:\n    file.truncate(2**40)", "file"),
    stopped("output flood", "while True:\n    print('x' * 10000)", "output"),
    stopped("error output flood", "import os\nwhile True:\n    os.write(2, b'x' * 10000)", "exit code"),
    stopped(
        "endless loop that ignores signals",
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 19):\n    "
        "    signal.signal(n, signal.SIG_IGN)\nwhile True:\n    pass",
    ),
    stopped(
        "sleeps forever",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    signal.pause()",
        "wall",
    ),
    stopped("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "wall"),
    stopped(
        "becomes another program",
        "import os\nos.execv('/python/bin/python3', ['python3', '-S', '-c', 'while True: pass'])",
    ),
    stopped("overflow of the stack", "import ctypes\nctypes.string_at(0)", "signal"),
    stopped(
        "nested directories",
        "import os\nfor _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\nraise SystemExit(1)",
        "exit code",
    ),
    stopped("descriptors", "import os\nheld = [os.pipe() for _ in range(5000)]", "exit code"),
    stopped("import-time payload: constants", "x = 'a' * (2**33)", "memory"),
    stopped("import-time payload: parentheses", "x = " + "(" * 5000 + ")" * 5000, "exit code"),
    stopped(
        "import-time payload: a module's own __del__", "class A:\n    def __del__(self):\n        while True: pass\nA()"
    ),
    stopped("never ends at its end", "import atexit\ndef hang():\n    while True: pass\natexit.register(hang)"),
    # forged verdicts
    forged(
        "prints what a verdict looks like",
        'print(\'{"passed": [true], "score": 1.0, "status": "ok"}\')\nprint(\'OK\')\nprint(\'PASSED\')',
        PRINT,
    ),
    forged("exit code 0, stdout", "import os\nos._exit(0)", PRINT),
    forged("exit code 0 at import, assertions", "import sys\nsys.exit(0)", ASSERT),
    forged("exit code 0 in the call, assertions", "import os\ndef f(x):\n    os._exit(0)", ASSERT),
    forged("exit code 0 in the call, check", "import sys\ndef f(x):\n    sys.exit(0)", CHECK),
    forged("exit code 0 in the call, call", "import os\ndef f(x):\n    os._exit(0)", CALL),
    forged(
        "exit code 0 at the end", "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0", ASSERT
    ),
    forged("searches its objects for the answer, stdout", SEARCH + "print(search())", PRINT),
    forged("searches its objects for the answer, call", SEARCH + "def f(x):\n    return search()", CALL),
    forged("searches its objects for the answer, assertions", SEARCH + "def f(x):\n    return search()", ASSERT),
    forged("searches its memory for the answer, stdout", MEMORY + "print(search())", PRINT),
    forged("searches its memory for the answer, assertions", MEMORY + "def f(x):\n    return search()", CHECK),
    forged("is equal to everything, assertions", ALWAYS_EQUAL, ASSERT),
    forged("is equal to everything, check", ALWAYS_EQUAL, CHECK),
    forged("is equal to everything, call", ALWAYS_EQUAL, CALL),
    forged("is close to everything", ALWAYS_EQUAL, CLOSE),
    forged(
        "replaces builtins",
        "import builtins\nbuiltins.set = builtins.len = builtins.abs = lambda *a: 3\nbuiltins.AssertionError = "
        "SystemExit\nset = len = abs = lambda *a: 3\ndef f(x):\n    return 1",
        ASSERT,
    ),
    forged(
        "replaces math",
        "import math, sys\nmath.isclose = lambda *a, **k: True\nsys.modules['math'] = math\nabs = "
        "lambda x: 0\ndef f(x):\n    return 1",
        CLOSE,
    ),
    forged(
        "replaces the writer of values, call",
        "import sys\nsys.modules['values'].encode = lambda *a: 'needle'\nimport json\njson.dumps = lambda *a: "
        "'\"needle\"'\ndef f(x):\n    return 1",
        CALL,
    ),
    forged(
        "replaces the writer of values, assertions",
        "import sys, json\nsys.modules['values'].encode = lambda *a: True\ndef f(x):\n    return 1",
        ASSERT,
    ),
    forged("defines the tests' own names", "candidate = check = lambda *a: True\ndef f(x):\n    return 1", CHECK),
    forged("raises AssertionError", "def f(x):\n    raise AssertionError", ASSERT),
    *(forged(f"raises {kind} in the tests' loops", f"def f(x):\n    raise {kind}", LOOPS) for kind in ENDS),
    *(forged(f"raises {kind} in a loop of check", f"def f(x):\n    raise {kind}", LOOP_CHECK) for kind in ENDS),
    forged(
        "raises a StopIteration of its own",
        "class Fine(StopIteration, ValueError):\n    pass\ndef f(x):\n    raise Fine",
        LOOP_CHECK,
    ),
    forged(
        "raises an exception that is called StopIteration",
        "class StopIteration(Exception):\n    pass\ndef f(x):\n    raise StopIteration",
        LOOP_CHECK,
    ),
    forged(
        "raises an exception with the tests' names",
        "class candidate(Exception):\n    pass\ncheck = Gone = Unsupported = candidate\ndef f(x):\n    raise candidate",
        LOOP_CHECK,
    ),
    forged(
        "raises a group of StopIterations", "def f(x):\n    raise ExceptionGroup('', [StopIteration()])", LOOP_CHECK
    ),
    forged(
        "StopIteration from a method of what it returns",
        "class A:\n    def stop(self, *_):\n        raise "
        "StopIteration\n    __iter__ = __len__ = __getitem__ = __str__ = stop\ndef f(x):\n    return A()",
        OBJECT,
    ),
    forged(
        "StopIteration out of __getattr__",
        "class A:\n    def __getattr__(self, name):\n        raise StopIteration\ndef f(x):\n    return A()",
        OBJECT,
    ),
    forged(
        "StopIteration out of a property",
        "class A:\n    @property\n    def value(self):\n        raise StopIteration\ndef f(x):\n    return A()",
        OBJECT,
    ),
    forged("forges a reply that raises StopIteration", FORGED_RAISE.replace("KIND", "StopIteration"), LOOPS),
    forged("forges a reply that raises GeneratorExit", FORGED_RAISE.replace("KIND", "GeneratorExit"), LOOPS),
    forged("forges a reply that raises SystemExit", FORGED_RAISE.replace("KIND", "SystemExit"), LOOPS),
    forged("a generator that ends at once", "def f(x):\n    return\n    yield", LOOPS),
    forged(
        "a generator that raises StopIteration", "def f(x):\n    yield 'needle'\n    raise StopIteration", LOOP_CHECK
    ),
    forged(
        "an iterator that ends early",
        "class A:\n    def __iter__(self): return self\n    def __next__(self): "
        "raise StopIteration\ndef f(x):\n    return A()",
        LOOP_CHECK,
    ),
    forged(
        "an exception whose words end the program",
        "class Fine(ValueError):\n    def __str__(self): raise SystemExit(0)\ndef f(x):\n    raise Fine",
        EXPECTS,
    ),
    forged(
        "an exception that is equal to everything",
        "class Fine(Exception):\n    __eq__ = __ne__ = lambda *a: True\n    __hash__ = lambda self: 0\ndef f(x):\n    "
        "raise Fine",
        EXPECTS,
    ),
    forged("ends where an exception is expected", "import os\ndef f(x):\n    os._exit(0)", EXPECTS),
    forged("exits where an exception is expected", "import sys\ndef f(x):\n    sys.exit(0)", {"test_list": [CATCH]}),
    forged(
        "KeyboardInterrupt where an exception is expected",
        "def f(x):\n    raise KeyboardInterrupt",
        {"test_list": [CATCH]},
    ),
    forged(
        "nonsense where an exception is expected",
        "import os\ndef f(x):\n    os.write(3, b'\\xff' * 100)",
        {"test_list": [CATCH]},
    ),
    forged(
        "ends under a bare except",
        "import os\ndef f(x):\n    os._exit(0)",
        {"test_list": [CATCH.replace(" Exception", "")]},
    ),
    forged(
        "raises an exception that lies",
        "class Fine(Exception):\n    __class__ = type(None)\n    def "
        "__str__(self): raise SystemExit(0)\ndef f(x):\n    raise Fine",
        CHECK,
    ),
    forged("writes results to every descriptor, stdout", FRAMES, PRINT),
    forged("writes results to every descriptor, call", FRAMES + "def f(x):\n    return 1", CALL),
    forged("writes results to every descriptor, assertions", FRAMES + "def f(x):\n    return 1", ASSERT),
    forged(
        "writes results to every descriptor in the call",
        "def f(x):\n" + "".join(f"    {line}\n" for line in FRAMES.splitlines()),
        CHECK,
    ),
    forged(
        "nonsense for an answer", "import os, struct\ndef f(x):\n    os.write(3, b'\\xff' * 100)\n    return 1", ASSERT
    ),
    forged("an answer without end", "import itertools\ndef f(x):\n    return itertools.count()", ASSERT),
    forged("an answer that contains itself", "def f(x):\n    x = []\n    x.append(x)\n    return x", CHECK),
    forged(
        "an answer 100,000 levels deep", "import os\ndef f(x):\n    os.write(4, b'[' * 100000)\n    os._exit(0)", CALL
    ),
    forged("keys that collide", "def f(x):\n    return {i * (2**61 - 1): 0 for i in range(1000)}", CALL),
    forged("a number of 100,000 digits", "import os\ndef f(x):\n    os.write(4, b'9' * 100000)\n    os._exit(0)", CALL),
    forged("output that is no text", "import os\nos.write(1, bytes(range(256)) * 100)", PRINT),
    forged("hangs in the call", "def f(x):\n    while True: pass", ASSERT),
    forged("hangs at import", "while True: pass", CHECK),
]
