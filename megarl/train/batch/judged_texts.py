"""Texts of trained responses as their verifier has seen them, to ask a verifier for another verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.schema import Reward, Task, Trajectory
from megarl.core.text import opens_thinking
from megarl.rewards.again import COSTLY
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import ChatTokenizer

SHAPES = ("format", "repetition", "language")
"""Parts of a reward that settings add for a response's form."""


class JudgedTexts:
    """Reads chosen responses of a step, with their tasks."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store
        self._tokenizer: ChatTokenizer | None = None

    def of(self, chosen: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, Task, str, bool]]:
        """Yield (trajectory, task, text, in_thinking) of those whose task the store has, in order."""
        tasks = self._store.facts.tasks({one.task_id for one in chosen})
        tokenizer = self._tokenizer = self._tokenizer or ChatTokenizer.of(self._config)
        for whole in self._store.groups.whole(chosen):
            if (task := tasks.get(whole.task_id)) is not None:
                context, response = whole.answered()
                in_thinking = opens_thinking(tokenizer.decode(context, special=True))
                yield whole, task, tokenizer.decode(response), in_thinking


def can_be_asked(one: Trajectory) -> bool:
    """Return True if a verifier can give a response's verdict again, at little cost."""
    verifier = one.metadata.get("reward", {}).get("verifier", "")
    return verifier not in COSTLY and one.cause is None and one.reward.status not in NO_VERDICT


def verifier_score(reward: Reward, config: Config) -> float:
    """Return the verifier's weighted score in a trained reward: the reward without the parts that settings add."""
    settings, parts = config.reward, reward.parts
    added = parts.get("overlong", 0.0) + settings.length.weight * parts.get("length", 0.0)
    added += config.reward_model.coef * parts.get("model", 0.0)
    form = sum(getattr(settings, name).weight * parts.get(name, 0.0) for name in SHAPES)
    return reward.score - added - form
