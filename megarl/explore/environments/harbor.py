"""Task folders of Harbor (Apache-2.0): ``rollout.environment=harbor``. Commands run in bubblewrap, without a
container."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.core.thoughts import without_thought
from megarl.explore.environments import harbor_sandbox
from megarl.explore.environments.harbor_sandbox import HarborSandbox
from megarl.explore.environments.options import checked, refuse
from megarl.explore.environments.types import Observation
from megarl.tasks.harbor import read_folder

log = logging.getLogger(__name__)

Number = int | float
OPTIONS = {"turns": int, "command_s": Number, "tests_s": Number, "output_bytes": int, "reward": str, "rules": str}
"""``turns``: most responses; ``command_s``, ``tests_s``: upper bounds on task.toml's limits; ``output_bytes``: of an
observation; ``reward``: the key in reward.json; ``rules``: text after the instruction."""
TURNS, COMMAND_S, TESTS_S, OUTPUT_BYTES, REWARD = 20, 60.0, 200.0, 4096, "reward"
RULES = (
    "You work in a Linux shell without a network, in {workdir}. Write one command, or several lines, in a block that "
    "begins with ```bash and ends with ```; you then see its output. Each block runs in a new shell. When all is done, "
    "write DONE on a line of its own."
)
UNREAD = "Write a command in a block that begins with ```bash and ends with ```, or DONE on a line of its own."
BLOCK = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)(?:(^```)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A block and its end. An unclosed block extends to the end of the text and is not run."""
DONE = re.compile(r"^[ \t]*DONE[ \t.]*$", re.MULTILINE)
ENDED = {"time": "(the command was ended after {:g} s)", "memory": "(out of memory: all processes were killed)"}


class Harbor:
    """One episode of a task.

    A response has a block of commands, and the observation is their output; or it declares the task done. The tests
    then run in the same sandbox, after all processes are killed and reward files removed. They also run after the last
    of ``turns``, after the task's time limit, and after a limit of the trajectory. Without a reward file the reward is
    0.

    Args:
        task: A row of ``read_folders``: ``extra_info['folder']`` is the task's folder.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self.check_row(task)
        self._options = options
        self._task = read_folder(Path(task.extra_info["folder"]))
        self._left = options.get("turns", TURNS)
        self._seconds = self._task.agent_s
        self._most = options.get("output_bytes", OUTPUT_BYTES)
        self.sandbox = HarborSandbox(self._task)
        """Shell in which the model acts."""

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the options are valid and a sandbox can be made."""
        checked("harbor", options, OPTIONS)
        for name in ("turns", "command_s", "tests_s", "output_bytes"):
            if name in options and not 0 < options[name] < math.inf:
                refuse(name, options[name], "must be above 0")
        if options.get("output_bytes", OUTPUT_BYTES) < 2:
            refuse("output_bytes", options["output_bytes"], "must be 2 or more: it has a first and a last half")
        harbor_sandbox.prove()

    @staticmethod
    def check_run_dir(run_dir: Path) -> None:
        """Raise ConfigError if sandboxes would show the run's directory."""
        if (place := harbor_sandbox.shown(run_dir)) is not None:
            raise ConfigError(
                f"run.dir={run_dir}: every sandbox of rollout.environment=harbor shows {place}, and with it the run's "
                "files; set it to a folder elsewhere"
            )

    @staticmethod
    def check_row(task: Task) -> None:
        """Raise DataError for a row without a task folder, or with a folder that sandboxes show."""
        folder = task.extra_info.get("folder")
        if not isinstance(folder, str):
            raise DataError(
                "extra_info.folder names no task folder, which rollout.environment=harbor plays; give a folder of "
                "Harbor tasks for the taskset's file, or set another environment"
            )
        if (place := harbor_sandbox.shown(Path(folder))) is not None:
            raise DataError(
                f"{folder}: every sandbox shows {place}, its tests and solution too; move the task elsewhere"
            )

    @staticmethod
    def longest_call_s(options: Mapping[str, Any]) -> float:
        """Return the longest seconds of a call that runs a command and then the tests."""
        return float(options.get("command_s", COMMAND_S) + options.get("tests_s", TESTS_S))

    def reset(self) -> str:
        """Return the rules for responses."""
        return str(self._options.get("rules", RULES)).replace("{workdir}", self._task.workdir)

    def step(self, response: str) -> Observation:
        """Run the commands of a response, and after the last response the tests."""
        self._left -= 1
        answer = without_thought(response)
        blocks = [block for block, end in BLOCK.findall(answer) if end]
        done = DONE.search(BLOCK.sub(lambda block: "" if block[2] else block[0], answer)) is not None
        seen = "\n".join(self._run(block) for block in blocks[:1]) or ("" if done else UNREAD)
        if done or not self._left or self._seconds <= 0:
            return Observation("", self.end(), done=True)
        return Observation(seen)

    def end(self) -> float:
        """Run the tests and return their reward."""
        limit = min(self._task.verifier_s, self._options.get("tests_s", TESTS_S))
        found = self.sandbox.tests(limit, OUTPUT_BYTES)
        try:
            if found["limit"]:
                raise ValueError(ENDED[found["limit"]].format(limit))
            return reward_of(found.get("file"), found.get("reward", ""), self._options.get("reward", REWARD))
        except (ValueError, OverflowError, RecursionError) as error:
            last = found["output"].strip()[-300:]
            log.warning("%s: the tests give no reward, which counts as 0: %s; %s", self._task.folder, error, last)
            return 0.0

    def kill(self) -> None:
        """Kill a timed-out call."""
        self.sandbox.kill()

    def close(self) -> None:
        """End the sandbox and its processes."""
        self.sandbox.close()

    def _run(self, command: str) -> str:
        limit = min(self._options.get("command_s", COMMAND_S), self._seconds)
        found = self.sandbox.run(command, limit, self._most)
        self._seconds -= found["seconds"]
        ended = ENDED[found["limit"]].format(limit) if found["limit"] else ""
        return "\n".join(filter(None, (found["output"].rstrip("\n"), ended))) or "(no output)"


def reward_of(file: str | None, text: str, name: str) -> float:
    """Parse the reward in a file as Harbor does. Raises ValueError if it has none, OverflowError if it exceeds a float.

    Args:
        name: Key of the reward in a reward.json with several.
    """
    if file is None:
        raise ValueError("there is neither /logs/verifier/reward.json nor reward.txt")
    value: Any = json.loads(text) if file == "reward.json" else text
    if isinstance(value, dict):
        if name not in value and len(value) != 1:
            raise ValueError(f"{file} has no {name!r}, but {', '.join(map(str, value))}; set rollout.options.reward")
        value = value[name] if name in value else next(iter(value.values()))
    if file == "reward.json" and not isinstance(value, int | float):
        raise ValueError(f"{file} has {value!r:.60}, which is no number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{file} has {value!r:.60}, which is not finite")
    return number
