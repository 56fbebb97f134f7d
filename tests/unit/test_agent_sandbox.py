"""Commands in the sandbox: they reach the endpoint, and nothing else that a job has on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.agents import program
from megarl.explore.agents.program import CommandSandbox
from megarl.explore.recording.model import RolloutModel
from megarl.tasks import ChatTokenizer
from tests.chat_battery import checkpoint
from tests.unit.agent_model import Model, recorder, run_workflow_of, trajectory

pytestmark = pytest.mark.sandbox
CLIENT = """
import json, os, socket, subprocess, sys, urllib.request
given = json.load(sys.stdin)
def ask(url=os.environ["OPENAI_BASE_URL"]):
    body = {"messages": given["prompt"], **given["request_kwargs"]}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def end(result):
    with open(os.environ["MEGARL_RESULT"], "w") as file:
        json.dump(result, file)
def fails(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
    return False
"""
Play = Callable[..., RolloutModel]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


@pytest.fixture
def play(tmp_path: Path, tokenizer: ChatTokenizer) -> Play:
    """Run a command in the sandbox against a model that writes given texts."""

    def run(
        source: str, *texts: str, arguments: str = "", seconds: Sequence[float] = (), **changes: Any
    ) -> RolloutModel:
        folder = tmp_path / "agent"
        folder.mkdir(exist_ok=True)
        (folder / "solve.py").write_text(CLIENT + source)
        changes = {"agent": f"{sys.executable} {folder}/solve.py {arguments}", "agent_sandbox": True, **changes}
        rollout = RolloutConfig(workflow="agent", max_prompt_tokens=100, **changes)
        recorded = recorder(Model(tokenizer, *texts, seconds=seconds), limit=400)

        run_workflow_of(rollout, tokenizer, recorded, timeout_s=120)
        return recorded

    return run


def score(recorded: RolloutModel) -> Any:
    verdict = asyncio.run(recorded.verdict())
    return verdict.reward.score if not verdict.message else verdict.message


def test_a_command_reaches_the_endpoint_and_gives_its_reward(play: Play) -> None:
    recorded = play("end({'score': 0.25 * (ask() == '15') + (ask() == '16')})", "15", "16")
    assert score(recorded) == 1.25 and trajectory(recorded).end is End.FINISHED
    assert len(list(trajectory(recorded).samples())) == 2


def test_a_command_sees_nothing_of_the_job(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store.db").write_text("tasks")
    monkeypatch.setenv("MEGARL_JOB_KEY", "secret")
    source = """
store, port, pid = os.path.join(*sys.argv[1].split(":")), int(sys.argv[2]), int(sys.argv[3])
processes = [name for name in os.listdir("/proc") if name.isdigit()]
def environ(name):
    try:
        return open(f"/proc/{name}/environ", "rb").read()
    except OSError:
        return b""
def files(name):
    try:
        return [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
    except OSError:
        return []
seen = {
    "store": os.path.exists(store),
    "key": any(b"MEGARL_JOB_KEY" in environ(name) for name in processes),
    "descriptors": any("agent-result" in file for name in processes for file in files(name)),
    "processes": len(processes) > 3,
    "own code": not fails(open, os.path.abspath(__file__), "a"),
    "system": not fails(open, "/usr/x", "w"),
    "etc": os.path.exists("/etc/shadow"),
    "network": not fails(socket.create_connection, ("127.0.0.1", port), 2),
    "namespace": subprocess.run(["unshare", "-U", "true"], stderr=subprocess.DEVNULL).returncode == 0,
    "signal": not fails(os.kill, pid, 0),
    "memory": not fails(open("/dev/shm/large", "wb").write, bytes(2**26 + 2**20)),
    "devices": not fails(open, "/dev/own", "w"),
}
for folder in (".", os.environ["TMPDIR"], os.environ["HOME"]):
    open(os.path.join(folder, "own"), "w").close()
ask()
end({"score": 1.0 - sum(seen.values()), **{"parts": {name: float(value) for name, value in seen.items()}}})
"""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        recorded = play(source, "15", arguments=f"{tmp_path}:store.db {port} {os.getpid()}")
    assert score(recorded) == 1.0, asyncio.run(recorded.verdict()).reward.parts


def test_a_command_that_fails_is_an_error_and_nothing_it_started_is_left(play: Play) -> None:
    mark = f"sleep-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
ask()
subprocess.Popen(["bash", "-c", "exec -a {mark} sleep 1000"], start_new_session=True, env={{}})
time.sleep(0.2)
sys.exit("no idea")
"""
    recorded = play("import time" + source, "15")
    assert "status 1: no idea" in score(recorded)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _exists(path)]
    assert not [line for line in lines if mark.encode() in line]


def _exists(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("sandboxed", [True, False])
@pytest.mark.parametrize("rewards", [True, False])
def test_a_command_that_is_killed_is_an_error_whatever_it_wrote_last(
    play: Play, sandboxed: bool, rewards: bool
) -> None:
    source = """
import signal
ask()
sys.stderr.write("handled: 400 the context leaves no room within rollout.max_trajectory_tokens=400\\n")
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    recorded = play(source, "15", agent_sandbox=sandboxed, agent_rewards=rewards)
    assert trajectory(recorded).cause is End.WORKFLOW_ERROR and "killed by SIGKILL" in score(recorded)


def test_a_result_that_is_a_link_is_refused(play: Play, tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("1.0")
    recorded = play(f"ask()\nos.symlink({str(tmp_path / 'store.json')!r}, os.environ['MEGARL_RESULT'])", "15")
    assert "symbolic links" in score(recorded)


def test_what_a_command_writes_stays_in_its_sandbox(play: Play) -> None:
    source = """
ask()
with open(os.environ["MEGARL_RESULT"], "wb") as file:
    try:
        while True:
            file.write(bytes(2**24))
    except OSError as error:
        full = error.strerror
size = os.path.getsize(os.environ["MEGARL_RESULT"])
if size < 2**31:
    os.truncate(os.environ["MEGARL_RESULT"], 0)
    end(1.0 if "space" in full else full)
"""
    assert score(play(source, "15")) == 1.0


def test_many_requests_at_once(play: Play) -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(40) as pool:
    texts = list(pool.map(lambda _: ask(), range(40)))
end(len(set(texts)))
"""
    recorded = play(source, *map(str, range(40)))
    assert score(recorded) == 40.0 and len(list(trajectory(recorded).samples())) == 40


def test_a_client_that_goes_away_is_seen(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its request is at the model, which gives no response."""
    seen, sample = tmp_path / "seen", Model.sample

    async def noted(model: Model, request: SampleRequest) -> Completion:
        (seen / "asked").touch()
        return await sample(model, request)

    seen.mkdir()
    monkeypatch.setattr(Model, "sample", noted)
    source = f"""
import http.client, time
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
client = http.client.HTTPConnection(url.netloc)
body = json.dumps({{"messages": given["prompt"], **given["request_kwargs"]}})
client.request("POST", url.path, body, {{"Content-Type": "application/json"}})
while not os.path.exists({str(seen / "asked")!r}):
    time.sleep(0.01)
client.close()
end(1.0)
"""
    assert trajectory(play(source, "15", seconds=[math.inf], agent_paths=[str(seen)])).end is End.ABANDONED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent": "python {agent}/solve.py"}, None),
        ({"agent": "{agent}/solve.py"}, "runs in the explorer's process"),
        ({"agent": "python {agent}/solve.py", "agent_paths": ["/no/such"]}, r"\['/no/such'\]: /no/such does not exist"),
        ({"agent": "python {agent}/solve.py /"}, "would show all of /"),
        ({"agent": "python {agent}/solve.py", "agent_paths": ["{home}"]}, "a separate folder"),
        ({"agent": "python {agent}/solve.py", "agent_paths": ["{run}"]}, "would show run.dir="),
    ],
)
def test_settings_are_checked(tmp_path: Path, changes: dict[str, Any], words: str | None) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "solve.py").write_text("async def run(base_url, prompt, request_kwargs, metadata): ...")
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    places = {"agent": tmp_path / "agent", "home": Path.home(), "run": run_dir.parent}
    filled = {
        name: value.format(**places) if isinstance(value, str) else [each.format(**places) for each in value]
        for name, value in changes.items()
    }
    rollout = RolloutConfig(workflow="agent", agent_sandbox=True, **filled)
    if words is None:
        program.check(rollout, run_dir)
        return
    with pytest.raises(ConfigError, match=words):
        program.check(rollout, run_dir)


def test_a_run_among_the_systems_programs_is_refused() -> None:
    sandbox = CommandSandbox.of([sys.executable], [], None)
    with pytest.raises(ConfigError, match="would show run.dir=/usr/src/app/runs to the agent, with /usr"):
        sandbox.prove(Path("/usr/src/app/runs"))


def test_an_interpreter_whose_installation_is_the_home_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"would show all of {tmp_path} to the command"):
        CommandSandbox.of([f"{tmp_path}/bin/python3", "-m", "solver"], [], None)


def test_a_job_may_start_in_the_root_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    CommandSandbox.of([sys.executable], [], None).prove(tmp_path)


@pytest.mark.parametrize("shown", ["files of this machine", "its network", "its processes"])
def test_a_sandbox_that_hides_nothing_is_refused(tmp_path: Path, shown: str) -> None:
    sandbox = CommandSandbox.of([sys.executable], [], None)
    words = {
        "files of this machine": ["--bind", tempfile.gettempdir(), tempfile.gettempdir()],
        "its network": ["--share-net"],
        "its processes": ["--ro-bind", "/proc", "/proc"],
    }[shown]
    wrapper = tmp_path / "bwrap"
    wrapper.write_text(f"#!/bin/bash\nwhile [ $1 != -- ]; do a+=(\"$1\"); shift; done\n"
                       f"exec {sandbox.bwrap} \"${{a[@]}}\" {' '.join(words)} \"$@\"\n")  # fmt: skip
    wrapper.chmod(0o755)
    with pytest.raises(ConfigError, match=f"a program in it sees {shown}"):
        dataclasses.replace(sandbox, bwrap=str(wrapper)).prove(tmp_path)
