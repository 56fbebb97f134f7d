"""The game ``guess`` as an environment of verifiers, whose tasks are rows of ``rows.json``; nothing of megarl."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessConfig(vf.TasksetConfig):
    file: str


class GuessData(vf.TaskData):
    ground_truth: str
    tries: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        for row in json.loads(Path(self.config.file).read_text()):
            yield GuessTask(GuessData(**row), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        number, left, reward = int(task.data.ground_truth), task.data.tries, 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                found = re.findall(r"-?\d+", segment.last_reply)
                guess = int(found[-1]) if found else None
                left -= 1
                if guess == number:
                    reward = 1.0
                if guess is None or guess == number or not left:
                    break
                segment = await interaction.turn("higher" if guess < number else "lower")
        interaction.trace.record_reward("found", reward, 1.0)
