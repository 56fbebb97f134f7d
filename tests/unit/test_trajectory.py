"""Turns of a trajectory, and the samples that a trainer gets from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.config.algorithms import AlgorithmConfig, PreferenceConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Outcome, Reward, Trajectory, Turn
from megarl.explore.experience.groups import group_stats
from megarl.learn import algorithms
from megarl.run.loop.batch import make_batch
from megarl.run.loop.learner import step_input
from tests.trajectories import one_turn


def trajectory(turns: tuple[Turn, ...], index: int = 0, score: float = 1.0) -> Trajectory:
    return Trajectory("r", "t", "g", index, 2, turns, Reward(score, "ok"))


def turn(author: str, *ids: int, follows: int = -1) -> Turn:
    """Log-probs are the ids' negatives."""
    tokens = np.array(ids, dtype=np.int32)
    logp = -tokens.astype(np.float32) if author == "model" else None
    return Turn(author, tokens, follows, logp, finish_reason="stop" if author == "model" else None)  # type: ignore[arg-type]


def test_a_single_response_is_one_sample_without_a_copy() -> None:
    prompt, response = one_turn([5, 6, 7], [8, 9])
    given = trajectory((prompt, response))
    [sample] = given.samples()
    assert sample.prompt_ids is prompt.token_ids and sample.response_ids is response.token_ids
    assert sample.engine_logp is response.logp and sample.response_mask.tolist() == [True, True]
    assert (given.prompt_length, given.response_length, given.finish_reason) == (3, 2, "stop")


def test_tokens_of_a_tool_are_in_no_loss() -> None:
    turns = (turn("user", 1, 2), turn("model", 3, 4, follows=0), turn("tool", 5, 6, follows=1))
    [sample] = trajectory((*turns, turn("model", 7, follows=2))).samples()
    assert sample.prompt_ids.tolist() == [1, 2] and sample.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert sample.response_mask.tolist() == [True, True, False, False, True]
    assert sample.engine_logp.tolist() == [-3, -4, 0, 0, -7]
    [sample] = trajectory(turns).samples()
    assert sample.response_ids.tolist() == [3, 4], "what the model does not answer leads to nothing"


def test_a_rewritten_context_gives_a_second_sample() -> None:
    """The fourth turn sums up the conversation; the fifth goes on from the first answer too."""
    turns = (
        turn("user", 1),
        turn("model", 2, follows=0),
        turn("tool", 3, follows=1),
        turn("model", 4, follows=2),
        turn("user", 5),
        turn("model", 6, follows=4),
        turn("model", 7, follows=1),
    )
    first, second, third = trajectory(turns).samples()
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([1], [2, 3, 4])
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([5], [6])
    assert (third.prompt_ids.tolist(), third.response_ids.tolist()) == ([1, 2], [7]), "2 is trained in the first"


@st.composite
def trees(draw: st.DrawFn) -> tuple[Turn, ...]:
    """A prompt and turns that follow any earlier one, or none where they are not the model's."""
    turns = [turn("user", 1)]
    for i in range(draw(st.integers(0, 8))):
        author = draw(st.sampled_from(["model", "tool", "user"]))
        follows = draw(st.integers(0 if author == "model" else -1, len(turns) - 1))
        turns.append(turn(author, *range(100 * (i + 1), 100 * (i + 1) + draw(st.integers(1, 3))), follows=follows))
    return tuple(turns)


@given(turns=trees())
def test_every_token_of_the_model_is_trained_once(turns: tuple[Turn, ...]) -> None:
    """In the context that it was sampled in."""
    trained: list[int] = []
    for sample in trajectory(turns).samples():
        mask, own = sample.response_mask, sample.response_ids[sample.response_mask]
        assert len(sample.prompt_ids) and len(sample.response_ids) == len(mask)
        assert mask[0] and mask[-1] and not sample.engine_logp[~mask].any()
        assert sample.engine_logp[mask].tolist() == (-own).tolist()
        trained += own.tolist()
        tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
        for number, one in enumerate(turns):
            if one.author == "model" and one.token_ids[0] in own:
                at, context = tokens.index(int(one.token_ids[0])), []
                while (number := turns[number].follows) >= 0:
                    context = [*turns[number].token_ids.tolist(), *context]
                assert tokens[:at] == context
    assert sorted(trained) == [int(t) for one in turns if one.author == "model" for t in one.token_ids]


def test_what_a_step_keeps_of_a_trajectory_is_no_array() -> None:
    given = trajectory(one_turn([5, 6, 7], [8, 9]))
    kept = Outcome.of(replace(given, greedy=given))
    assert (kept.prompt_length, kept.response_length, kept.reward, kept.finish_reason) == (3, 2, given.reward, "stop")
    assert kept.greedy == Outcome.of(given)
    assert not any(isinstance(value, np.ndarray | Turn | tuple) for value in vars(kept).values())


TWO_LINES = (turn("user", 1), turn("model", 2, follows=0), turn("user", 5), turn("model", 6, 7, follows=2))


def test_samples_of_a_trajectory_share_its_reward_and_its_group() -> None:
    members = [trajectory(TWO_LINES, 0, 1.0), trajectory(one_turn([1], [3]), 1, 0.0)]
    stats = group_stats([1.0, 0.0])
    grpo, settings = algorithms.get("grpo"), AlgorithmConfig()
    batch = make_batch([replace(t, group_stats=stats) for t in members], [], grpo, settings, 1)
    assert len(batch.outcomes) == 2 and [row.index for row in batch.rows] == [0, 0, 1]
    assert batch.sequences.tokens.tolist() == [1, 2, 5, 6, 7, 1, 3] and batch.updates == [[[0], [1], [2]]]
    batch.sequences.old_logp = torch.zeros(7)
    given = step_input(batch, grpo, settings, 0.0)
    assert given.rewards.tolist() == [1.0, 1.0, 0.0] and given.stats == [stats] * 3


def test_pairs_are_of_whole_trajectories() -> None:
    members = [trajectory(TWO_LINES, 0, 1.0), trajectory(one_turn([1], [3]), 1, 0.0)]
    with pytest.raises(NonRetryableError, match=r"algorithm.name=online_dpo .* 2 of them give 3 samples"):
        make_batch(members, [], algorithms.get("online_dpo"), PreferenceConfig(name="online_dpo"), 1)
