"""A batch's sequences against recorded turns, and recorded tokens against those of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import DataError, JobError
from megarl.core.schema import JUDGED, Reward, Task, Trajectory, Turn, digest_of, text_digest
from megarl.explore.recording.turns import RecordedEnd, RecordedTurns
from megarl.tasks import ChatTokenizer
from megarl.tasks.templates.turns import messages_of, render_turns, turn_ids
from megarl.train.batch.recorded_lines import RecordedLine, Templates, difference, lines_of
from tests.chat_battery import TEMPLATES, checkpoint
from tests.trajectories import one_turn


def dialogue() -> tuple[Turn, ...]:
    first = one_turn([1, 2, 3], [4, 5], [-1.0, -2.0])
    seen = Turn("environment", np.array([6, 7], np.int32), follows=1)
    last = replace(first[1], token_ids=np.array([8], np.int32), logp=np.array([-3.0], np.float32), follows=2)
    return (*first, seen, last)


def as_batch(line: RecordedLine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask and log-probs as a batch has them: of the token after each position."""
    return line.tokens, np.append(line.mask[1:], False), np.append(line.logp[1:], 0.0)


def test_a_dialogue_is_one_line_with_both_responses_in_the_loss() -> None:
    [line] = lines_of(dialogue())
    assert line.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert line.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert line.logp.tolist() == [0, 0, 0, -1, -2, 0, 0, -3]


def test_a_turn_of_two_lines_is_trained_once() -> None:
    *before, last = dialogue()
    other = replace(before[2], token_ids=np.array([9], np.int32))
    turns = (*before, last, other, replace(last, follows=4))
    first, second = lines_of(turns)
    assert first.mask.sum() == 3 and second.mask.tolist() == [False] * 6 + [True]


def test_equal_sequences_have_no_difference() -> None:
    [line] = lines_of(dialogue())
    assert difference(line, *as_batch(line)) is None


@pytest.mark.parametrize("name", ["tokens", "mask", "log-probs"])
def test_a_difference_is_named(name: str) -> None:
    [line] = lines_of(dialogue())
    tokens, mask, logp = (array.copy() for array in as_batch(line))
    match name:
        case "tokens":
            tokens[4] = 0
        case "mask":
            mask[4] = True
        case _:
            logp[2:4] = logp[3], logp[2]
    found = difference(line, tokens, mask, logp)
    assert found is not None and found[0] == name


def test_a_response_must_be_the_one_that_the_engine_has_computed() -> None:
    turns = RecordedTurns(RecordedEnd(), 20, 100)
    prompt, response = one_turn([1, 2], [3, 4])
    turns.begin(prompt.token_ids, (), False)
    context = turns.begin_response(-1)
    turn = turns.end_response(context, response, None)
    turns.check_computed(turn, digest_of(np.array([1, 2, 3, 4], np.int32)))
    with pytest.raises(JobError, match="has computed other tokens than the 4 recorded ones"):
        turns.check_computed(turn, digest_of(np.array([1, 1, 2, 3, 4], np.int32)))


TASK = Task("t", "sums", ({"role": "user", "content": "2 + 2"},), "", {"ground_truth": "4"})


def trajectory(tokenizer: ChatTokenizer, *more: Turn, prompt: Sequence[int] | None = None) -> Trajectory:
    ids = tokenizer.prompt_ids([dict(TASK.prompt[0])]) if prompt is None else prompt
    turns = (*one_turn(ids, [*tokenizer.encode("4").ids, tokenizer.end_id]), *more)
    judged = {JUDGED: text_digest("4")}
    return Trajectory("r", "t", "g", 0, 1, turns, Reward(1.0, "ok"), metadata=judged)


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_of_published_templates_are_as_they_write_them(name: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / name, name))
    templates = Templates(tokenizer, "environment")
    for role in ("user", "tool"):
        for texts in (["higher"], ["higher", "lower"]):
            try:
                rendered = render_turns(tokenizer, messages_of(role, texts))
            except DataError:
                continue
            ids = turn_ids(tokenizer, rendered, tokenizer.end_id)
            seen = Turn("environment", ids, follows=1)
            assert templates.difference(trajectory(tokenizer, seen), TASK) is None
            if role == "user" and len(texts) == 1:
                cut = replace(seen, token_ids=ids[:-1])
                assert templates.difference(trajectory(tokenizer, cut), TASK) is not None


def test_a_prompt_is_the_template_of_its_row_or_has_an_observation_in_it(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))
    whole = tokenizer.prompt_ids([dict(TASK.prompt[0])])
    assert Templates(tokenizer, "single_turn").difference(trajectory(tokenizer, prompt=whole), TASK) is None
    found = Templates(tokenizer, "single_turn").difference(trajectory(tokenizer, prompt=whole[3:]), TASK)
    assert found is not None and found[0] == "template"
    shown = tokenizer.prompt_ids([{"role": "user", "content": "2 + 2\n\nbegin"}])
    assert Templates(tokenizer, "environment").difference(trajectory(tokenizer, prompt=shown), TASK) is None
    assert Templates(tokenizer, "single_turn").difference(trajectory(tokenizer, prompt=shown), TASK) is not None


def test_a_text_that_was_cut_before_it_was_judged_is_named(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))
    found = replace(trajectory(tokenizer), metadata={JUDGED: text_digest("")})
    assert (Templates(tokenizer, "single_turn").difference(found, TASK) or ("",))[0] == "text"
