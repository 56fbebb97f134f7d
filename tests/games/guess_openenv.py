"""The game ``guess`` as an OpenEnv server: ``python guess_openenv.py PORT PLACES``; nothing of megarl."""

from __future__ import annotations

import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class GuessAction(Action):
    message: str


class GuessObservation(Observation):
    text: str


class GuessEnvironment(Environment[GuessAction, GuessObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: Any = None, episode_id: Any = None, ground_truth: str = "0", tries: int = 4) -> Any:  # type: ignore[override]
        self.number, self.left = int(ground_truth), tries
        return GuessObservation(text="")

    def step(self, action: GuessAction, timeout_s: float | None = None) -> Any:  # type: ignore[override]
        found = re.findall(r"-?\d+", action.message)
        guess = int(found[-1]) if found else None
        self.left -= 1
        if guess == self.number:
            return GuessObservation(text="", reward=1.0, done=True)
        if guess is None or not self.left:
            return GuessObservation(text="", reward=0.0, done=True)
        return GuessObservation(text="higher" if guess < self.number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State()


app = create_app(
    GuessEnvironment, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=int(sys.argv[2])
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
