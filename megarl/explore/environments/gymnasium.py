"""Environments of gymnasium (MIT): ``rollout.environment=gymnasium``, the environment named by ``rollout.options``.

The package is not one of megarl's own: ``pip install gymnasium``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any

from megarl.core.errors import ConfigError, describe
from megarl.core.schema import Task
from megarl.core.text import without_thought
from megarl.explore.environments.types import Observation, checked, last_number, refuse
from megarl.tasks.image_rows import png_of

OPTIONS = {"id": str, "kwargs": dict, "actions": dict}
"""``id``: as ``gymnasium.make`` takes it, also ``module:Name-v0``; ``kwargs``: of the environment; ``actions``: word,
case-insensitive -> discrete action."""
WORD = re.compile(r"\w+")


class Gymnasium:
    """One episode.

    An action is the response's text; or, if discrete, its last word in ``actions``, else its last number. A response
    without an action ends the episode. Observations are texts or JSON; with ``render_mode`` in ``kwargs``, the result
    of ``render()``: a text with ``ansi``, a picture with ``rgb_array``.

    Args:
        task: ``ground_truth`` and ``extra_info`` are ``options`` of the environment's ``reset``.
        group_seed: Seed of ``reset``: all trajectories of a task begin in one state.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, group_seed: int, options: Mapping[str, Any]) -> None:
        import gymnasium

        self._env = gymnasium.make(options["id"], disable_env_checker=True, **options.get("kwargs", {}))
        self._words = {word.lower(): action for word, action in options.get("actions", {}).items()}
        self._discrete = isinstance(self._env.action_space, gymnasium.spaces.Discrete)
        self._seed = group_seed
        self._row = {**task.extra_info, "ground_truth": task.ground_truth}

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the package and the environment exist, and responses can express its actions."""
        checked("gymnasium", options, OPTIONS, {"id": "FrozenLake-v1"})
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("rollout.environment=gymnasium: the package is not installed; pip install gymnasium")
        import gymnasium

        try:
            env = gymnasium.make(options["id"], disable_env_checker=True, **options.get("kwargs", {}))
        except Exception as error:
            refuse("id", options["id"], f"cannot be made: {describe(error)}")
        if Gymnasium.shows_images(options):
            try:
                env.reset(seed=0)
                png_of(env.render())
            except Exception as error:
                refuse("kwargs", options["kwargs"], f"gives no picture: {describe(error)}")
        space = env.action_space
        env.close()
        if not isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            refuse("id", options["id"], f"has actions {space}; give an environment whose actions are Text or Discrete")
        words: dict[str, str] = {}
        for word, action in options.get("actions", {}).items():
            if not isinstance(word, str) or not WORD.fullmatch(word.lower()):
                refuse(
                    "actions", {word: action}, "names an action by no single word; give a text of letters, digits and _"
                )
            if (other := words.setdefault(word.lower(), word)) != word:
                refuse("actions", {word: action}, f"is the same word as {other!r}: case is not read; remove one")
            if not isinstance(space, gymnasium.spaces.Discrete) or action not in space:
                refuse("actions", {word: action}, f"is no discrete action of {options['id']}, which has {space}")

    @staticmethod
    def shows_images(options: Mapping[str, Any]) -> bool:
        """Return True if observations are pictures."""
        return options.get("kwargs", {}).get("render_mode") == "rgb_array"  # type: ignore[no-any-return]

    def reset(self) -> Observation:
        """Reset the environment; an empty observation adds nothing to the task's prompt."""
        seen, _ = self._env.reset(seed=self._seed, options=self._row)
        return self._observation(seen)

    def step(self, response: str) -> Observation:
        """Take the response's action."""
        action = self._action(without_thought(response))
        if action is None:
            return Observation("", done=True, success=False)
        seen, reward, terminated, truncated, _ = self._env.step(action)
        return self._observation(seen, float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _action(self, response: str) -> str | int | None:
        if not self._discrete:
            return response
        if self._words:
            found = [word for word in WORD.findall(response.lower()) if word in self._words]
            return int(self._words[found[-1]]) if found else None
        action = last_number(response)
        return action if action is not None and action in self._env.action_space else None

    def _observation(self, seen: Any, reward: float = 0.0, *, done: bool = False) -> Observation:
        if self._env.render_mode == "rgb_array":
            return Observation("", reward, done, images=[png_of(self._env.render())])
        if self._env.render_mode == "ansi":
            return Observation(str(self._env.render()), reward, done)
        text = seen if isinstance(seen, str) else json.dumps(seen, default=lambda value: value.tolist())
        return Observation(text, reward, done)
