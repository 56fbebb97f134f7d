"""Task folders of Harbor: how they are read, and episodes of two small ones in the real sandbox.

Tests against Harbor itself are skipped without the package::

    python3.12 -m venv /tmp/envs/harbor && /tmp/envs/harbor/bin/pip install --no-deps harbor==0.26.0
    /tmp/envs/harbor/bin/pip install pydantic toml pathspec python-dotenv
    MEGARL_HARBOR_PYTHON=/tmp/envs/harbor/bin/python pytest tests/unit/test_harbor.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from megarl.config import Config
from megarl.config.schema import RolloutConfig
from megarl.config.taskset import TasksetConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.explore import environments, workflows
from megarl.explore.environments import EnvironmentFault, EpisodeThreads
from megarl.explore.environments.harbor import BLOCK, UNREAD, reward_of
from megarl.explore.environments.types import in_thread
from megarl.explore.recording.model import TokenLimits
from megarl.explore.workflows.environment import environment
from megarl.run.checks.inputs import check_environment_rows
from megarl.run.run_dir.prepare import missing_data
from megarl.tasks.harbor import read_folder
from megarl.tasks.rows import read_rows
from tests.unit.test_environments import Model

HARBOR = os.environ.get("MEGARL_HARBOR_PYTHON", "")
with_harbor = pytest.mark.skipif(not HARBOR, reason="MEGARL_HARBOR_PYTHON names no Python with harbor")
sandbox = pytest.mark.sandbox
READ = """
import sys
from harbor.models.task.task import Task
import json
for folder in sys.argv[1:]:
    task = Task(folder)
    config = task.config
    print(json.dumps([task.instruction, config.agent.timeout_sec, config.verifier.timeout_sec,
                      config.environment.memory_mb, config.environment.storage_mb, config.verifier.env]))
"""
HELLO = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 99.0\n[verifier]\ntimeout_sec = 90.0\n'
    "[environment]\nmemory = '256M'\nstorage_mb = 32\n",
    "instruction.md": "<!-- harbor-canary 1 -->\n\nWrite hello into hello.txt.\n",
    "environment/Dockerfile": "# small\nFROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\nif grep -qx hello hello.txt; then echo 1; else echo 0; fi"
    " > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho hello > hello.txt\n",
}
SORT = {
    "task.toml": 'schema_version = "1.4"\n[verifier]\nenv = { WANTED = "1 2 3" }\n'
    '[environment]\nnetwork_mode = "public"\n',
    "instruction.md": "Sort the numbers of data/numbers.txt into /out/sorted.txt.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /work\nCOPY numbers.txt data/\nCOPY empty /out\n",
    "environment/numbers.txt": "3\n1\n2\n",
    "environment/empty/keep": "",
    "tests/test.sh": "#!/bin/bash\nbash /tests/check.sh\n",
    "tests/check.sh": 'n=0; [ "$(echo $(cat /out/sorted.txt))" = "$WANTED" ] && n=1\n'
    'echo "{\\"reward\\": $n, \\"lines\\": 3}" > /logs/verifier/reward.json\n',
    "solution/solve.sh": "#!/bin/bash\nsort data/numbers.txt > /out/sorted.txt\n",
}


def written(folder: Path, files: dict[str, str], **changed: str | None) -> Path:
    """Write a task; ``changed`` by the stems of files, None leaves one out."""
    for name, text in files.items():
        new = changed.get(Path(name).stem, text)
        if new is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(new)
    return folder


def row(folder: Path) -> Task:
    (found,) = read_rows(folder, split="train")
    return found


def block(*lines: str) -> str:
    return "\n".join(("I do this:", "```bash", *lines, "```"))


def play(folder: Path, *responses: str, truncated: int | None = None, **options: Any) -> Model:
    model = Model(*responses, truncated=truncated)
    model.limits, model.options = TokenLimits(), options
    played: Any = model
    asyncio.run(environment(environments.get("harbor"), EpisodeThreads(8, 300.0))(row(folder), played))
    assert model.reason is None, model.reason
    return model


def score(folder: Path, *responses: str, **options: Any) -> tuple[float, str]:
    reward = play(folder, *responses, **options).reward
    assert reward is not None
    return reward.score, reward.status


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    return written(tmp_path / "tasks" / "hello", HELLO)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return written(tmp_path / "tasks" / "sort", SORT)


def test_a_folder_of_tasks_is_read_as_rows(hello: Path, numbers: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = read_rows(hello.parent, split="train")
    assert [task.task_id for task in rows] == ["train/0", "train/1"]
    assert rows[0].prompt[0]["content"] == "Write hello into hello.txt.\n"
    assert rows[0].extra_info == {"folder": str(hello.resolve()), "name": "hello", "digest": ANY}
    assert "sort/task.toml: the task asks for a network; it has none here" in caplog.text
    task = read_folder(hello)
    assert (task.agent_s, task.verifier_s, task.memory_mb, task.storage_mb) == (99.0, 90.0, 256, 32)
    caplog.clear()
    read_folder(numbers)
    assert not caplog.records, "each episode reads its folder, and the warning comes once"


def test_a_task_whose_files_change_is_another_row(hello: Path) -> None:
    before = row(hello)
    assert row(hello) == before
    written(hello, {"solution/other.sh": "ls\n"})
    assert row(hello) == before, "no solution is played"
    (hello / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    assert row(hello) != before and row(hello).task_id == before.task_id


@with_harbor
def test_harbor_reads_the_same(hello: Path, numbers: Path) -> None:
    done = subprocess.run([HARBOR, "-c", READ, hello, numbers], capture_output=True, text=True, check=True)
    ours = [
        [task.instruction, task.agent_s, task.verifier_s, task.memory_mb, task.storage_mb, task.verifier_env]
        for task in map(read_folder, (hello, numbers))
    ]
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    assert theirs[1][1] is None and ours[1][1] == float("inf")
    assert theirs[1][3:5] == [None, None] and ours[1][3:5] == [2048, 1024]
    assert [task for task in theirs if None not in task] == ours[:1]
    assert (theirs[1][0], theirs[1][2], theirs[1][5]) == (ours[1][0], ours[1][2], ours[1][5])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"task": "["}, r"task.toml: is not TOML"),
        ({"task": None}, r"task.toml: no such file, which each Harbor task has; add it or remove"),
        ({"instruction": None}, r"instruction.md: no such file"),
        ({"instruction": "# canary\n"}, r"instruction.md: is empty; write what"),
        ({"test": None}, r"tests/test.sh: no such file"),
        ({"Dockerfile": None}, r"environment/Dockerfile: no such file"),
        ({"Dockerfile": "FROM a\nWORKDIR /app\nRUN make\n"}, r"Dockerfile: 'RUN make': only FROM, WORKDIR and COPY"),
        ({"Dockerfile": "FROM a\nWORKDIR /app\nCOPY --from=b /x /y\n"}, r"only FROM, WORKDIR and COPY"),
        ({"Dockerfile": "FROM a\nWORKDIR /app\nCOPY ../tests .\n"}, r"COPY \.\./tests: is no file or folder of"),
        ({"Dockerfile": "FROM a\nWORKDIR /app\nCOPY none .\n"}, r"COPY none: is no file"),
        ({"Dockerfile": "FROM a\nWORKDIR /usr/src\n"}, r"'/usr/src' is in the system, which is read-only here"),
        ({"Dockerfile": "FROM a\nWORKDIR app\n"}, r"'app' is relative, and no WORKDIR comes before it"),
        ({"Dockerfile": "FROM a\n"}, r"Dockerfile: sets no WORKDIR; add one"),
        ({"task": "[environment]\ndocker_image = 'a'\n"}, r"docker_image: the task needs an image"),
        ({"task": "[environment]\ngpus = 1\n"}, r"gpus: the task needs GPUs, and there is no container engine"),
        ({"task": "[environment]\nallowed_hosts = ['a']\n"}, r"allowed_hosts: the task needs a network"),
        ({"task": "[environment]\nos = 'Windows'\n"}, r"environment.os must be 'linux', got 'Windows'"),
        ({"task": "[verifier]\nenvironment_mode = 'separate'\n"}, r"environment_mode must be 'shared'"),
        ({"task": "[verifier]\nenv = {K = '${KEY}'}\n"}, r"verifier.env.K takes a variable of this machine"),
        ({"task": "[agent]\ntimeout_sec = 0\n"}, r"agent.timeout_sec must be a number above 0 and below 1e.15, got 0"),
        ({"task": "agent = 3\n"}, r"agent must be a table, got 3"),
        ({"task": "[environment]\nmemory = 'much'\n"}, r"environment.memory must be a size such as 2G, got 'much'"),
        ({"task": "[[steps]]\nname = 'a'\n"}, r"steps: the task has several steps"),
        ({"task": "[environment]\nmemory_mb = inf\n"}, r"environment.memory_mb must be a number above 0 and below"),
        ({"task": "[environment]\nmemory = '0M'\n"}, r"environment.memory must be a size such as 2G, got '0M'"),
        ({"task": "[environment]\nenv = {'A=B' = 'c'}\n"}, r"environment.env.'A=B': no variable has such a name"),
        ({"Dockerfile": "FROM a\nWORKDIR /app\nCOPY Dockerfile /tmp\n"}, r"/tmp would be a file in /, which is"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(tmp_path: Path, changed: dict[str, str | None], words: str) -> None:
    written(tmp_path / "a", HELLO, **changed)
    with pytest.raises(DataError, match=words):
        read_rows(tmp_path)


@pytest.mark.parametrize("link", ["tests", "tests/test.sh"])
def test_tests_that_are_a_link_are_refused(hello: Path, link: str) -> None:
    (hello / link).rename(hello / "elsewhere")
    (hello / link).symlink_to(hello / "elsewhere")
    with pytest.raises(DataError, match=f"{link}: is a link, and what it leads to is in no sandbox"):
        read_folder(hello)


@pytest.mark.parametrize("target", ["../solution", "sub/../../solution/solve.sh", "/tmp", "{tests}/test.sh"])
def test_links_that_lead_out_of_the_tests_are_refused(hello: Path, target: str) -> None:
    (hello / "tests" / "sub").mkdir()
    (hello / "tests" / "sub" / "inside").symlink_to("../test.sh")
    (hello / "tests" / "python").symlink_to("/usr/bin/python3")
    read_folder(hello)
    (hello / "tests" / "out").symlink_to(target.format(tests=hello / "tests"))
    with pytest.raises(DataError, match="tests/out: is a link, and what it leads to is in no sandbox"):
        read_folder(hello)


def test_files_without_room_are_refused(tmp_path: Path) -> None:
    big = written(tmp_path / "a", HELLO, Dockerfile="FROM a\nWORKDIR /app\nCOPY big .\n")
    for file, words in ((big / "environment/big", "33 MB of files for /app, .* 32 MB"), (big / "tests/b", "300 MB")):
        file.touch()
        os.truncate(file, 33 * 2**20 if file.name == "big" else 300 * 2**20)
        with pytest.raises(DataError, match=words):
            read_folder(big)
        os.truncate(file, 0)


def test_a_file_is_copied_into_a_folder_that_is_there(tmp_path: Path) -> None:
    lines = "COPY data /app/data\nCOPY x.txt /app/data\nCOPY x.txt /app/data/sub\nCOPY x.txt /app/data/y\n"
    files = {**HELLO, "environment/data/sub/q": "q", "environment/x.txt": "x"}
    task = read_folder(
        written(tmp_path / "a", files, Dockerfile=f"FROM a\nWORKDIR /app/work\n{lines}COPY x.txt /app\n")
    )
    places = ["/app/data", "/app/data/x.txt", "/app/data/sub/x.txt", "/app/data/y", "/app/x.txt"]
    assert [place for _, place in task.copies] == places


def test_a_job_takes_a_folder_for_a_file(hello: Path, numbers: Path) -> None:
    """One that is there is not to be generated; one that is not is named."""
    tasks = TasksetConfig(train=str(hello), eval=str(numbers), generate=None, warm_start=None)
    assert missing_data(Config(taskset=tasks)) == {}
    with pytest.raises(ConfigError, match=r"taskset\.train=/nowhere: no such file"):
        missing_data(Config(taskset=replace(tasks, train="/nowhere")))


@sandbox
@pytest.mark.parametrize("place", ["/usr/share", "/etc/ssl/certs"])
def test_what_every_sandbox_would_show_is_refused(hello: Path, place: str) -> None:
    rollout = RolloutConfig(workflow="environment", environment="harbor", max_prompt_tokens=64)
    config = Config(rollout=rollout, taskset=TasksetConfig(train=str(hello)))
    check_environment_rows(config, {"train": [row(hello)]})
    with pytest.raises(DataError, match=r"hello.*\(taskset.train\).*: every sandbox shows .*, its tests and solution"):
        check_environment_rows(config, {"train": [replace(row(hello), extra_info={"folder": place})]})
    with pytest.raises(DataError, match=r"extra_info.folder names no task folder"):
        check_environment_rows(config, {"train": [replace(row(hello), extra_info={})]})
    with pytest.raises(ConfigError, match=r"run.dir=.*: every sandbox of rollout.environment=harbor shows"):
        workflows.check(rollout, Path(place, "runs"))


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no Harbor task; give a folder with task.toml"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("reward.txt", "0.5\n", 0.5),
        ("reward.json", '{"reward": 1, "a": 0}', 1.0),
        ("reward.json", '{"a": 0.25}', 0.25),
        ("reward.json", "true", 1.0),
        ("reward.json", '{"a": 1, "b": 1}', "has no 'reward', but a, b; set rollout.options.reward"),
        ("reward.json", '{"reward": "1"}', "'1', which is no number"),
        ("reward.json", "1e999", "is not finite"),
        ("reward.json", "1" + "0" * 400, "too large"),
        ("reward.txt", "", "could not convert"),
        ("reward.txt", "nan", "is not finite"),
        (None, "", "neither"),
    ],
)
def test_a_reward_is_read_as_harbor_does(file: str | None, text: str, found: float | str) -> None:
    if isinstance(found, float):
        assert reward_of(file, text, "reward") == found
        return
    with pytest.raises((ValueError, OverflowError), match=found):
        reward_of(file, text, "reward")


@sandbox
def test_options_are_checked_and_the_sandbox_is_proven() -> None:
    for options, words in (
        ({"turns": 0}, "turns=0 must be above 0"),
        ({"output_bytes": 1}, "output_bytes=1 must be 2 or more"),
        ({"tries": 1}, "tries=1 is no option"),
        ({"tests_s": 900}, "environment_timeout_s=300 is too short for a call.*may take 990 s"),
        ({}, None),
    ):
        rollout = RolloutConfig(workflow="environment", environment="harbor", options=options, max_prompt_tokens=64)
        if words is None:
            workflows.check(rollout, Path("runs"))
            continue
        with pytest.raises(ConfigError, match=words):
            workflows.check(rollout, Path("runs"))


@sandbox
def test_a_solved_task_is_worth_1_and_another_0(hello: Path, numbers: Path) -> None:
    for folder, files in ((hello, HELLO), (numbers, SORT)):
        solution = files["solution/solve.sh"]
        model = play(folder, "let me see", block(solution), block("pwd; cat data/*.txt"), "DONE")
        assert model.reward is not None and (model.reward.score, model.reward.status) == (1.0, "ok"), model.messages
        assert model.first is not None and model.first.startswith("You work in a Linux shell without a network, in /")
        assert model.messages[0][1].startswith("Write a command in a block") and model.messages[1][1] == "(no output)"
        assert score(folder, block("ls") + "\nAll is right.\nDONE") == (0.0, "wrong")
    assert "/work" in model.messages[2][1] and "3\n1\n2" in model.messages[2][1]


@sandbox
def test_a_command_in_a_thought_is_not_run(hello: Path) -> None:
    thought = f"<think>\n{block('echo hello > hello.txt')}\nDONE\n"
    model = play(hello, f"{thought}</think>\n{block('ls -A')}", thought, "DONE")
    assert [text for _, text in model.messages] == ["(no output)", UNREAD]
    assert model.reward is not None and model.reward.score == 0.0


@pytest.mark.timeout(60)
def test_blocks_that_are_not_closed_are_read_in_linear_time() -> None:
    """Searches from each beginning to the end would take hours."""
    assert [end for _, end in BLOCK.findall("```bash\n" * 200_000)] == [""]
    assert BLOCK.findall("```sh\nls\n```\n```bash\nid") == [("ls\n", "```"), ("id", "")]


@sandbox
def test_a_limit_ends_an_episode_and_the_tests_run(hello: Path) -> None:
    solution = block("echo hello > hello.txt")
    assert score(hello, solution, turns=1) == (1.0, "ok")
    assert score(hello, solution, "and so", truncated=1) == (1.0, "wrong")
    assert score(hello, solution + "\nDONE", turns=5) == (1.0, "ok")


@sandbox
def test_output_is_truncated_and_limits_end_commands(hello: Path) -> None:
    model = play(
        hello,
        block("echo begin; yes | head -c 3000000; echo end"),
        block("sleep 600 & setsid sleep 600 & echo left"),
        block("tail /dev/zero"),
        block("head -c 99000000 /dev/zero > big; rm big"),
        block("exec > /dev/null 2>&1 < /dev/null; sleep 0.1"),
        "DONE",
        output_bytes=200,
    )  # fmt: skip
    seen = [text for _, text in model.messages]
    assert seen[0].startswith("begin\ny\ny") and seen[0].endswith("y\nend") and "(2999810 more bytes)" in seen[0]
    assert len(seen[0]) < 250
    assert seen[1] == "left" and seen[2].endswith("(out of memory: all processes were killed)")
    assert "No space left on device" in seen[3] and seen[4] == "(no output)"
    late = play(hello, block("sleep 600"), "DONE", command_s=0.1)
    assert late.messages == [("environment", "(the command was ended after 0.1 s)")]


@sandbox
def test_the_time_of_a_task_is_that_of_its_commands(tmp_path: Path) -> None:
    quick = written(tmp_path / "a", HELLO, task="[agent]\ntimeout_sec = 2\n")
    assert score(quick, block("echo hello > hello.txt; sleep 600")) == (1.0, "ok")
    hanging = written(tmp_path / "b", HELLO, task="[verifier]\ntimeout_sec = 0.5\n", test="#!/bin/bash\nsleep 600\n")
    assert score(hanging, "DONE") == (0.0, "wrong")


CHEATS = {
    "a reward of its own": "cd /logs; mkdir verifier; echo 1 > verifier/reward.txt; echo 1 > verifier/reward.json",
    "a link": "mkdir /app/mine; echo 1 > /app/mine/reward.json; ln -s /app/mine /logs/verifier",
    "a process that writes it later": "setsid bash -c 'while :; do mkdir -p /logs/verifier; "
    "echo 1 > /logs/verifier/reward.json; done' > /dev/null 2>&1 &",
    "tests of its own": "echo 'echo 1 > /logs/verifier/reward.json' > /tests/test.sh; mkdir /tests/a; chmod 0 /tests/a",
    "folders that cannot be written": "mkdir -p /logs/verifier/a/b; chmod 0 /logs/verifier/a /logs/verifier /logs",
    "the first process": "kill -9 1; cat /proc/1/environ; ls -l /proc/1/fd; gdb -p 1",
    "a fifo": "rm -rf /logs/verifier; mkfifo /logs/verifier",
    "deep folders": "mkdir /logs/verifier; cd /logs/verifier; "
    "python3 -c \"import os\nfor i in range(3000): os.mkdir('a' * 200); os.chdir('a' * 200)\"",
    "no working folder": "cd /; rm -rf /app/src; touch /app/src",
    "a NUL": "echo a\0b",
    "a lone surrogate": "echo \ud800",
    "a module of the user's": "v=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $v; "
    'echo \'open("/logs/verifier/reward.json", "w").write("1")\' > $v/usercustomize.py',
    "the system": "echo 1 > /usr/bin/grep; mount -t tmpfs a /usr; unshare -Ur true; rm -rf /tests /logs",
}


@sandbox
@pytest.mark.parametrize("name", CHEATS)
def test_nothing_that_an_episode_writes_counts_as_a_reward(tmp_path: Path, name: str) -> None:
    test = HELLO["tests/test.sh"] + "python3 -c pass\n"
    nested = written(tmp_path / "a", HELLO, Dockerfile="FROM a\nWORKDIR /app/src\n", test=test)
    model = play(nested, block(CHEATS[name], "test ! -e /tests/check.sh || echo seen", "true") + "\nDONE")
    assert model.reward is not None and (model.reward.score, model.reward.status) == (0.0, "wrong")


@sandbox
@pytest.mark.parametrize(
    "text", ["mkdir /logs/verifier/reward.json", "printf '1%0400d' 0 > /logs/verifier/reward.json"]
)
def test_a_reward_that_is_none_is_worth_0(tmp_path: Path, text: str) -> None:
    assert score(written(tmp_path / "a", HELLO, test=f"#!/bin/bash\n{text}\n"), "DONE") == (0.0, "wrong")


@sandbox
def test_memory_is_watched_between_commands(hello: Path) -> None:
    episode: Any = environments.get("harbor")(row(hello), {})
    grows = "import time; time.sleep(0.5); x = b'x' * (300 << 20); time.sleep(77.8)"
    episode.step(block(f'setsid python3 -c "{grows}" > /dev/null 2>&1 &', "echo left"))
    for _ in range(600):
        if "77.8" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process that a command has left takes more than the task's memory")
    assert episode.step(block("echo alive")).text == "alive"
    episode.close()


@sandbox
def test_files_without_content_are_memory(tmp_path: Path) -> None:
    """Empty files of one episode took gigabytes of kernel memory, which no limit counted."""
    small = written(tmp_path / "a", HELLO, task=HELLO["task.toml"].replace("256M", "64M"))
    many = "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()"
    model = play(small, block("cd /tmp", f'python3 -c "{many}"'), "DONE")
    assert model.messages[0][1].endswith("(out of memory: all processes were killed)")
    assert model.reward is not None and model.reward.status == "wrong"


@sandbox
def test_tests_without_a_reward_are_worth_0_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = written(tmp_path / "a", HELLO, test="#!/bin/bash\ncurl -s http://10.0.0.1 || echo no network\n")
    with caplog.at_level(logging.WARNING):
        assert score(silent, "DONE") == (0.0, "wrong")
    assert "the tests give no reward, which counts as 0: there is neither" in caplog.text
    assert "no network" in caplog.text


@sandbox
def test_nothing_is_left_behind_and_a_call_can_be_ended(hello: Path) -> None:
    before = set(hello.rglob("*"))
    episode: Any = environments.get("harbor")(row(hello), {"command_s": 100})
    process = episode.sandbox.process
    call = in_thread(lambda: episode.step(block("touch here /tmp/there; sleep 77.7")))
    while "77.7" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
        time.sleep(0.02)
    episode.kill()
    with pytest.raises(EnvironmentFault, match="does not reply"):
        call.result(30)
    episode.close()
    assert process.returncode is not None and set(hello.rglob("*")) == before
    assert "77.7" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
