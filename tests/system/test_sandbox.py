"""The sandbox on this machine and at a service: results, limits, and the refusal where a layer of the isolation is
missing."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config.rewards import CodeConfig, RewardConfig
from megarl.core.errors import SandboxError
from megarl.rewards.code import check_code
from megarl.run.report import doctor
from megarl.sandbox import bubblewrap, client, selftest
from megarl.sandbox.bubblewrap import ALLOW, RETURN, Host
from megarl.sandbox.client import RemoteSandbox, open_sandbox
from megarl.sandbox.interface import MIB, Call, Checks, Limits, Sandbox, Test
from megarl.sandbox.local import LocalSandbox
from megarl.sandbox.selftest import local_sandbox

pytestmark = pytest.mark.sandbox
KEY = "a key of the tests, long enough"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service in a process of its own, with one worker and no queue."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl", "sandbox", "serve", "--port", str(port), "--workers", "1", "--queue", "0"],
        env={**os.environ, "MEGARL_SANDBOX_KEY": KEY}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert until(lambda: process.poll() is not None or answers(port)) and process.poll() is None, (
            "the service does not start"
        )
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["local", "remote"])
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setenv("MEGARL_SANDBOX_KEY", KEY)
    return open_sandbox(None if request.param == "local" else request.getfixturevalue("url"))


def test_results_are_the_same_here_and_there(sandbox: Sandbox) -> None:
    assert "bubblewrap on this machine, Python 3." in sandbox.describe()
    program = "import sys\nx = input()\nprint('got', x)\nprint('oops', file=sys.stderr)\nsys.exit(int(x))"
    first, second = sandbox.run(program, [Test("0\n"), Test("3\n")], Limits())
    assert (first.ok, first.exit_code, first.stdout, first.stderr, first.limit) == (True, 0, "got 0\n", "oops\n", None)
    assert (second.ok, second.exit_code, second.reason) == (False, 3, "exit code 3: oops")
    assert 0 < first.cpu_s < 10 and first.seconds > 0
    [result] = sandbox.run(
        "def f(a, b):\n    return a, b['k'], b[2]", [Test(call=Call("f", (1, {"k": "é", 2: (3,)})))], Limits()
    )
    assert json.loads(result.value or "") == {"t": "tuple", "v": [1, "é", {"t": "tuple", "v": [3]}]}
    checks = Checks(("assert f(1) == 2", "assert f(2) == 2", "assert g == 7"), "g = 7")
    found = sandbox.check("def f(x):\n    return x + 1", checks, Limits())
    assert (
        found.passed == (True, False, True) and found.reasons == ("", "AssertionError", "") and found.row_error is None
    )
    assert sandbox.check("", Checks(("assert (",)), Limits()).row_error is not None


def test_stop_ends_at_the_first_failure(sandbox: Sandbox) -> None:
    tests = [Test("1"), Test("x"), Test("2")]
    assert [r.ok for r in sandbox.run("int(input())", tests, Limits())] == [True, False, True]
    assert [r.ok for r in sandbox.run("int(input())", tests, Limits(), stop=True)] == [True, False]
    assert sandbox.run("", [], Limits()) == []


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "cpu"),
        ("import time\ntime.sleep(60)", "wall"),
        ("x = bytearray(10**9)", "memory"),
        ("print('x' * 10**7)", "output"),
        ("import os\nwhile True: os.fork() or os._exit(0)", None),
        ("import os, time\nwhile True: os.fork() or time.sleep(60)", "processes"),
        ("open('x', 'wb').write(bytes(2 * 10**7))", "file"),
    ],
)
def test_the_limit_that_struck_is_named(program: str, limit: str | None) -> None:
    limits = Limits(
        cpu_s=1, wall_s=1.5 if limit in ("wall", None) else 20.0, address_space_bytes=256 * MIB, processes=8
    )
    [result] = local_sandbox().run(program, [Test()], limits)
    assert not result.ok
    assert limit is None or result.limit == limit, result


def test_files_without_content_are_memory() -> None:
    """Empty files of one answer took gigabytes of kernel memory, which no limit counted."""
    limits = Limits(cpu_s=300, wall_s=300.0, memory_bytes=64 * MIB)
    program = "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()"
    [result] = local_sandbox().run(program, [Test()], limits)
    assert result.limit == "memory"


def test_time_for_all_tests_together() -> None:
    tests = [Test(str(i)) for i in range(10)]
    results = local_sandbox().run("import time\ntime.sleep(0.4)", tests, Limits(wall_s=5.0, total_s=3.0))
    assert 0 < len(results) < 10 and all(result.ok for result in results)


def test_large_inputs_and_outputs_arrive_whole() -> None:
    text = "äb" * 500_000
    [result] = local_sandbox().run("print(input())", [Test(text)], Limits())
    assert result.stdout == text + "\n"


def test_threads_share_a_sandbox() -> None:
    found: list[str] = []

    def work(i: int) -> None:
        found.extend(
            r.stdout for r in local_sandbox().run("print(int(input()) ** 2)", [Test(str(i))], Limits(wall_s=30.0))
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == [0, 1, 4, 9, 16, 25]


def test_packages_of_a_named_interpreter_are_there() -> None:
    """reward.code.python: a virtual environment with what programs may import."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        subprocess.run([bubblewrap.find().python, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        [site] = Path(folder).glob("lib/python*/site-packages")
        (site / "extra.py").write_text("x = 7")
        [result] = LocalSandbox(bubblewrap.find(f"{folder}/bin/python")).run(
            "import extra\nprint(extra.x)", [Test()], Limits()
        )
    assert result.stdout == "7\n", result


def test_killing_the_owner_kills_the_sandbox() -> None:
    """The reward pool kills its workers in the middle of anything."""
    script = (
        "from megarl.sandbox.selftest import local_sandbox\nfrom megarl.sandbox.interface import Limits, "
        "Test\n"
        "sandbox = local_sandbox()\nprint('ready', flush=True)\n"
        "sandbox.run('import time\\nwhile True: time.sleep(1)', [Test()], Limits(wall_s=100.0))"
    )
    before = sandbox_processes()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        assert until(lambda: len(sandbox_processes() - before) >= 2)
        started = {psutil.Process(int(pid)) for pid in sandbox_processes() - before}
        owner.kill()
    assert until(lambda: not any(map(alive, started)))


SLEEPS = "import time\ndef f():\n    time.sleep(30)"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("which", [0, -1], ids=["of the tests", "of the program"])
def test_what_is_killed_from_outside_says_nothing_of_the_program(which: int, nested: bool) -> None:
    """``check`` starts bwrap and perhaps a zygote for the tests, then both for the program; in each a launcher and a
    test's process."""
    sandbox = LocalSandbox(dataclasses.replace(bubblewrap.find(), nested=nested))
    limits, before = Limits(wall_s=60.0), sandbox_processes()
    checks = Checks(("assert f() == 1",))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(sandbox.check, SLEEPS, checks, limits)
        assert until(lambda: len(sandbox_processes() - before) >= (8 if nested else 6))
        started = sandbox_processes() - before
        bwraps = sorted(int(pid) for pid in started if b"--unshare-all" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(bwraps[which], signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended from outside"):
            job.result()
        assert pool.submit(sandbox.check, "def f(): return 1", checks, limits).result().passed == (True,)


@pytest.mark.parametrize("nested", [True, False])
def test_a_bwrap_that_is_killed_says_nothing_of_the_program(nested: bool) -> None:
    sandbox = LocalSandbox(dataclasses.replace(bubblewrap.find(), nested=nested))
    limits, before = Limits(wall_s=60.0), sandbox_processes()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(sandbox.run, "import time\ntime.sleep(30)", [Test()], limits)
        assert until(lambda: len(sandbox_processes() - before) >= (4 if nested else 3))
        started = sandbox_processes() - before
        [bwrap] = (int(pid) for pid in started if b"--unshare-all" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(bwrap, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended from outside"):
            job.result()
        [result] = pool.submit(sandbox.run, "import os\nos.kill(os.getpid(), 9)", [Test()], limits).result()
        assert result.exit_code == -9  # its own doing


def test_without_namespaces_within_namespaces_results_are_the_same() -> None:
    sandbox = LocalSandbox(dataclasses.replace(bubblewrap.find(), nested=False))
    selftest.prove(sandbox)
    assert [r.stdout for r in sandbox.run("print(input())", [Test("a"), Test("b")], Limits())] == ["a\n", "b\n"]
    assert sandbox.check("def f(): return 1", Checks(("assert f() == 1", "assert f() == 2")), Limits()).passed == (
        True,
        False,
    )


def test_a_mother_that_died_while_idle_is_replaced() -> None:
    sandbox, before = LocalSandbox(bubblewrap.find()), sandbox_processes()
    for _ in range(2):
        assert sandbox.run("print(1)", [Test()], Limits())[0].stdout == "1\n"
        for pid in sandbox_processes() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def sandbox_processes() -> set[str]:
    """Of this process and its children: another job on this machine may run programs too."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if b"/python/bin/python3" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                found.add(str(process.pid))
        except OSError:
            continue
    return found


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


# ---- the refusal ----


@dataclasses.dataclass(frozen=True)
class _Weak(Host):
    """This machine's sandbox with a layer taken away: what a kernel or container may do to us."""

    without: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def command(self, first: str, tmp_bytes: int, link: int, passed: int, filter_fd: int | None) -> list[str]:
        text = "\0".join(super().command(first, tmp_bytes, link, passed, filter_fd))
        for words in self.without:
            assert words in text
            text = text.replace(words + "\0", "")
        command = text.split("\0")
        at = command.index("--chdir")
        return [*command[:at], *self.more, *command[at:]]


OPEN_FILTER = struct.pack("<HBBI", RETURN, 0, 0, ALLOW)


def refusal(change: dict[str, Any]) -> str:
    found = bubblewrap.find()
    weak = _Weak(**{**{f.name: getattr(found, f.name) for f in dataclasses.fields(Host)}, **change})
    with pytest.raises(SandboxError, match="does not isolate programs, so none is run.*reward.code.url") as caught:
        selftest.prove(LocalSandbox(weak))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({**change, "nested": nested}, message)
            for nested in (False, True)
            for change, message in (
                (
                    {
                        "more": ("--ro-bind", "/etc", "/tmp/etc", "--symlink", "tmp/etc", "/etc"),
                        "without": ("--remount-ro\0/",),
                    },
                    "top has etc",
                ),
                ({"more": ("--setenv", "SECRET", "x")}, "environment has SECRET"),
                ({"without": ("--remount-ro\0/",)}, "/x is written"),
                ({"without": ("--as-pid-1",)}, "is not process 1"),
                ({"more": ("--dev-bind", "/dev", "/dev")}, "dev has"),
                ({"filter": OPEN_FILTER}, "a netlink socket is opened"),
            )
        ),
        # what is made again inside a zygote cannot be missing in it
        ({"user": None, "nested": False}, "more processes are started than the limit"),
        ({"more": ("--share-net",), "nested": False}, "a port of the host is reached"),
        ({"more": ("--share-net",), "nested": False}, "the net namespace is the host's"),
    ],
)
def test_without_a_layer_it_refuses(change: dict[str, Any], message: str) -> None:
    if "user" in change and os.geteuid() != 0:
        pytest.skip("only root's processes are not counted")
    assert message in refusal(change)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        (" | 0x20000000", "", "mount(b'proc'"),
        ("| 0x10000000", "", "clone("),
        ('must("capset"', 'call("prctl", 0', "capabilities"),
        ('must("prctl", PR_SET_SECCOMP', 'call("prctl", 0', "seccomp 0 instead of 2"),
        ('must("mount", b"proc"', 'call("prctl", 0', "pids"),
        ('b"/dev/shm", SHM_BYTES', 'b"/tmp", SHM_BYTES', "finds what another has left"),
        ('b"/tmp", tmp_bytes', 'b"/dev/shm", tmp_bytes', "finds what another has left"),
    ],
)  # fmt: skip
def test_a_mother_that_forgets_a_step_is_refused(line: str, instead: str, message: str) -> None:
    code = bubblewrap.sources()
    assert code["zygote"].count(line) == 1
    code["zygote"] = code["zygote"].replace(line, instead)
    found = bubblewrap.find()
    facts, _ = bubblewrap.ask(found.python, found.user, code)
    assert facts is not None
    try:
        assert message in refusal({"code": bytes.fromhex(facts["code"])})
    finally:  # where the step is missing that gives programs a folder of their own, this is the machine's
        Path("/dev/shm/left").unlink(missing_ok=True)


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap.*reward.code.url"):
        bubblewrap.find.__wrapped__()


def test_without_an_interpreter_it_refuses() -> None:
    for python in ("/nowhere/python", "/bin/false"):
        with pytest.raises(SandboxError, match=f"{python}: .*Set reward.code.python"):
            bubblewrap.find(python)


def test_a_bwrap_that_fails_is_an_error_with_its_words() -> None:
    for program in ("/bin/false", "/nowhere/bwrap"):
        with pytest.raises(SandboxError, match="does not start|did not start"):
            LocalSandbox(dataclasses.replace(bubblewrap.find(), bwrap=program)).run("print(1)", [Test()], Limits())


# ---- the service ----


def test_the_key_is_asked_for_everywhere(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox_with(KEY, url, monkeypatch)  # it is up
    with pytest.raises(SandboxError, match="refuses the key in MEGARL_SANDBOX_KEY"):
        open_sandbox_with("another key, just as long as it", url, monkeypatch)
    with pytest.raises(SandboxError, match="MEGARL_SANDBOX_KEY is empty"):
        open_sandbox_with("", url, monkeypatch)
    for path, header in (("/health", None), ("/run", "Bearer "), ("/check", f"Basic {KEY}"), ("/nothing", None)):
        assert request(url, path, header)[0] == 401


def open_sandbox_with(key: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setenv("MEGARL_SANDBOX_KEY", key)
    return open_sandbox(url)


def request(url: str, path: str, authorization: str | None, body: str = "{}") -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {} if authorization is None else {"Authorization": authorization}
    connection.request("GET" if path == "/health" else "POST", path, body, headers)
    with connection.getresponse() as response:
        return response.status, response.read().decode()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"program": "", "tests": [{"stdin": 1}], "limits": {}, "stop": false}',
        '{"program": "", "tests": [], "limits": {"cpu_s": -1}, "stop": false}',
    ],
)
def test_requests_that_make_no_sense_are_told_so(url: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox_with(KEY, url, monkeypatch)
    status, text = request(url, "/run", f"Bearer {KEY}", body)
    assert status == 400 and "error" in json.loads(text)


def test_a_busy_service_is_asked_again(url: str) -> None:
    """One worker, no queue: of four at once three are sent away at first."""
    found: list[str] = []

    def work(i: int) -> None:
        remote = RemoteSandbox(url, KEY)
        found.extend(
            r.stdout for r in remote.run(f"import time\ntime.sleep(0.3)\nprint({i})", [Test()], Limits(wall_s=30.0))
        )

    RemoteSandbox(url, KEY).describe()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["0\n", "1\n", "2\n", "3\n"]


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BUSY_S", 0.3)
    with pytest.raises(SandboxError, match="reward.code.url=http://127.0.0.1:9 fails"):
        open_sandbox_with(KEY, "http://127.0.0.1:9", monkeypatch)
    with pytest.raises(SandboxError, match="must be http://HOST:PORT"):
        open_sandbox_with(KEY, "127.0.0.1:9", monkeypatch)


def test_a_job_is_checked_before_it_starts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_code(RewardConfig()).startswith("bubblewrap on this machine")
    monkeypatch.setenv("MEGARL_SANDBOX_KEY", KEY)
    assert check_code(RewardConfig(code=CodeConfig(url=url))).endswith(f"at {url}")
    monkeypatch.setenv("MEGARL_SANDBOX_KEY", "another key, just as long as it")
    with pytest.raises(SandboxError, match=f"reward.code.url={url} refuses the key"):
        check_code(RewardConfig(code=CodeConfig(url=url)))
    monkeypatch.setattr(client, "BUSY_S", 0.3)
    with pytest.raises(SandboxError, match="reward.code.url=.*127.0.0.1:9 fails"):
        check_code(RewardConfig(code=CodeConfig(url="http://127.0.0.1:9")))


def test_the_doctor_says_whether_programs_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check.state for check in doctor.sandbox()] == ["ok"]
    monkeypatch.setattr(selftest, "known", {})
    monkeypatch.setattr(bubblewrap, "find", bubblewrap.find.__wrapped__)
    monkeypatch.setenv("PATH", "/nowhere")
    [check] = doctor.sandbox()
    assert check.state == "warn" and "apt-get install bubblewrap" in check.fix


def test_serving_wants_a_key_of_some_length() -> None:
    for key, said in (("", "has 0 characters"), ("short", "has 5 characters")):
        command = [sys.executable, "-m", "megarl", "sandbox", "serve", "--port", "0"]
        done = subprocess.run(
            command, env={**os.environ, "MEGARL_SANDBOX_KEY": key}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
