"""Of n responses the best is kept, and nothing of the others is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End, Reward, Task
from megarl.explore import workflows
from megarl.explore.workflows.single_turn import best_of_n
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer
from tests.chat_battery import checkpoint
from tests.unit.agent_model import Model
from tests.unit.test_workflow_run import play


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


class Longest:
    """A verifier whose score is the length of a text; of a text ``?`` it has none, of ``s2`` minus the length."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        self.asked.append((task.data_source, text))
        if text == "?":
            return Verdict(Reward(float("nan"), "error"))
        return Verdict(Reward(float(len(text)) * (-1 if task.data_source == "s2" else 1), "ok"))


@pytest.mark.parametrize(
    ("texts", "options", "kept", "asked"),
    [
        (("a", "cccc", "bb", "dddd"), {}, "cccc", 4),
        (("?", "a", "?"), {"n": 3}, "a", 3),
        (("aaa", "b", "cc"), {"n": 3, "by": "s2"}, "b", 4),
        (("?", "?"), {"n": 2}, "?", 2),
    ],
)
def test_the_best_is_kept(
    tokenizer: ChatTokenizer, texts: tuple[str, ...], options: dict[str, Any], kept: str, asked: int
) -> None:
    model, scorer = Model(tokenizer, *texts), Longest()
    arguments: dict[str, Any] = {"engine": model, "scorer": scorer, "options": options}
    [found] = play(best_of_n, tokenizer, **arguments)
    assert model.given == list(texts) and len({request.turn for request in model.requests}) == len(texts)
    assert [turn.author for turn in found.turns] == ["user", "model"]
    assert tokenizer.decode(found.turns[1].token_ids) == kept
    [sample] = found.samples()
    assert sample.response_mask.all() and tokenizer.decode(sample.response_ids) == kept
    assert len(scorer.asked) == asked, "no text is verified twice by one verifier"
    if kept == "?":
        assert found.end is End.REWARD_ERROR
    else:
        assert found.reward.score == len(kept), "the task's own verifier"


def test_a_turn_of_another_trajectory_is_not_kept(tokenizer: ChatTokenizer) -> None:
    async def workflow(task: Task, model: Any) -> None:
        model.ask(task)
        await model.generate()
        model.keep(model.turns[0])

    [found] = play(workflow, tokenizer)
    assert found.end is End.WORKFLOW_ERROR and "keep takes a turn that generate" in found.metadata["reward_message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 1}, r"rollout\.options\.n=1 of best_of_n must be a whole number from 2 to 128"),
        ({"n": True}, "must be a whole number"),
        ({"by": 3}, r"rollout\.options\.by=3"),
        ({"size": 3}, r"rollout\.options\.size is not an option of best_of_n; options: n, by"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workflows.check(RolloutConfig(workflow="best_of_n", options=options), tmp_path)
