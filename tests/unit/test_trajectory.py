"""Turns of a trajectory, and the samples that a trainer gets from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.buffer.experience import Report
from megarl.buffer.experience.operators import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config.algorithms import AlgorithmConfig, KLConfig, PPOConfig, PreferenceConfig, settings_of
from megarl.core.errors import NonRetryableError
from megarl.core.schema import TOOL_CALLS, End, FinishReason, Outcome, Reward, Task, Trajectory, Turn
from megarl.learn import algorithms
from megarl.learn.batching import micro_batches
from megarl.learn.batching.micro import MicroBatching
from megarl.learn.training import objectives
from megarl.learn.training.objectives import LossTokens
from megarl.train.batch.batch import StepBatch, filter_overlong, make_batch
from megarl.train.batch.samples import trajectory_metrics
from megarl.train.update.learner import step_input
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
    assert (kept.prompt_length, kept.response_length, kept.reward, kept.truncated) == (3, 2, given.reward, False)
    assert kept.greedy == Outcome.of(given)
    assert not any(isinstance(value, np.ndarray | Turn | tuple) for value in vars(kept).values())


TWO_LINES = (turn("user", 1), turn("model", 2, follows=0), turn("user", 5), turn("model", 6, 7, follows=2))


def test_metrics_count_turns_tool_calls_and_groups_of_equal_rewards() -> None:
    def metrics(*members: Trajectory) -> dict[str, float]:
        return trajectory_metrics([Outcome.of(member) for member in members], Report(2, {}, {}, ()))

    two, four = (trajectory(turns) for turns in (one_turn([1], [2]), TWO_LINES))
    assert "tool_call_counts/mean" not in (found := metrics(two, four)) and found["num_turns/mean"] == 3.0
    calls = metrics(two, replace(four, metadata={TOOL_CALLS: 3}))
    assert (calls["tool_call_counts/mean"], calls["tool_call_counts/max"]) == (1.5, 3.0)
    equal, other = (
        replace(two, group_id=f"{scores}", group_stats=group_stats(scores)) for scores in ([0.1] * 8, [0, 1])
    )
    assert metrics(equal, other)["rollout/zero_variance"] == 0.5
    assert "rollout/zero_variance" not in metrics(replace(two, group_stats=group_stats([1.0])))


def test_samples_of_a_trajectory_share_its_reward_and_its_group() -> None:
    members = [trajectory(TWO_LINES, 0, 1.0), trajectory(one_turn([1], [3]), 1, 0.0)]
    stats = group_stats([1.0, 0.0])
    grpo, settings = algorithms.get("grpo"), AlgorithmConfig()
    batch = make_batch([replace(t, group_stats=stats) for t in members], [], grpo, settings, 1)
    assert len(batch.outcomes) == 2 and [row.index for row in batch.rows] == [0, 0, 1]
    assert batch.sequences.tokens.tolist() == [1, 2, 5, 6, 7, 1, 3] and batch.updates == [[[0], [1], [2]]]
    batch.sequences.old_logp = torch.zeros(7)
    given = step_input(batch, grpo, settings)
    assert given.rewards.tolist() == [1.0, 1.0, 0.0] and given.stats == [stats] * 3


def three_lines(index: int, *lengths: int, reasons: tuple[FinishReason, ...] = ("stop",) * 3) -> Trajectory:
    """Samples of so many tokens each, without a common turn."""
    turns: list[Turn] = []
    for length, reason in zip(lengths, reasons, strict=False):
        prompt, response = one_turn([1, 2], range(length), finish_reason=reason)
        turns += [prompt, replace(response, follows=len(turns))]
    return replace(trajectory(tuple(turns), index), group_stats=group_stats([1.0, 0.0]))


AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def gradient(batch: StepBatch, name: str, settings: AlgorithmConfig, rows: int) -> tuple[torch.Tensor, float]:
    """Gradient of the loss in the log-prob of each trained token, and the loss, in micro-batches of ``rows``."""
    sequences = batch.sequences
    logp = torch.linspace(-2.0, -1.0, len(sequences.tokens)).requires_grad_()
    sequences.old_logp, sequences.engine_logp = logp.detach() * 1.01, logp.detach() * 0.99
    sequences.ref_logp, sequences.advantages = logp.detach() * 1.05, torch.where(sequences.row % 2 == 0, 1.0, -0.5)
    policy = objectives.policy(algorithms.get(name), settings, sequences)
    batches = micro_batches(sequences, MicroBatching(rows=rows), 0, [unit for part in batch.updates for unit in part])
    kept = [LossTokens.of(b, sequences) for b in batches]
    count = torch.stack([policy.count(k).double().reshape(-1) for k in kept]).sum(0)
    losses = [policy.loss(k, torch.stack([logp[k.index], -logp[k.index]], 1)) for k in kept]
    total = torch.stack([(loss.totals.double() / count).sum() for loss in losses]).sum()
    total.backward()
    assert logp.grad is not None
    return logp.grad[sequences.mask], float(total.detach())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "mix", "opmd"])
def test_tokens_weigh_alike_in_one_sample_and_in_three(name: str, aggregation: str) -> None:
    """Two trajectories of 30 tokens each; the loss of each token is -logp."""
    settings = settings_of(name)(name=name, aggregation=aggregation, aggregation_length=40, kl=KLConfig(0.0))
    settings = replace(settings, **({"mu": 0.0} if name == "mix" else {"tau": 0.0} if name == "opmd" else {}))
    members = [three_lines(0, 5, 10, 15), three_lines(1, 30)]
    batch = make_batch(members, [], algorithms.get("grpo"), settings, 1)
    batch.sequences.expert = torch.zeros(4, dtype=torch.bool) if name == "mix" else None
    sequences = batch.sequences
    for rows in (1, 2, 4):
        grad, _ = gradient(batch, name, settings, rows)
        assert sequences.old_logp is not None
        change = sequences.old_logp / 1.01 - sequences.old_logp
        ratio = torch.ones_like(change) if name == "opmd" else change.exp()
        expected = -torch.where(sequences.row % 2 == 0, 1.0, -0.5) * ratio
        wanted = {"token_mean": 60, "seq_mean_token_mean": 60, "seq_mean_token_sum": 2, "seq_mean_token_sum_norm": 80}
        assert torch.allclose(grad, (expected / wanted[aggregation])[sequences.mask], rtol=1e-5)


@given(
    parts=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    aggregation=st.sampled_from(AGGREGATIONS),
    name=st.sampled_from(["grpo", "gspo", "kimi_mirror_descent", "mix"]),
    rows=st.integers(1, 5),
)
def test_samples_of_a_trajectory_may_be_in_any_micro_batches(
    parts: list[list[int]], aggregation: str, name: str, rows: int
) -> None:
    """Also beside demonstrations, and in any order on the ranks."""
    importance = "sequence_mean" if name == "gspo" else "token"
    settings = settings_of(name)(name=name, aggregation=aggregation, importance=importance, kl=KLConfig(0.1))
    shown = [ExpertRow(np.arange(2), np.arange(n)) for n in (3, 1)] if name == "mix" else []
    members = [three_lines(i, *lengths) for i, lengths in enumerate(parts)]

    def found(rows: int) -> tuple[torch.Tensor, float]:
        batch = make_batch(members, shown, algorithms.get(name), settings, 1)
        return gradient(batch, name, settings, rows)

    (whole, loss), (split, same) = found(100), found(rows)
    assert torch.allclose(whole, split, rtol=1e-5, atol=1e-8) and loss == pytest.approx(same, rel=1e-5, abs=1e-7)


def test_trajectories_of_one_sample_each_are_weighted_as_before() -> None:
    members = [three_lines(0, 3), three_lines(1, 5)]
    batch = make_batch(members, [], algorithms.get("grpo"), AlgorithmConfig(), 1)
    assert batch.sequences.trajectory is None and objectives.sample_shares(batch.sequences) == (None, None)


def test_a_trajectory_is_in_one_update() -> None:
    members = [three_lines(0, 1, 2, 3), three_lines(1, 4), three_lines(2, 5)]
    assert make_batch(members, [], algorithms.get("grpo"), AlgorithmConfig(), 2).updates == [
        [[0], [1], [2]],
        [[3], [4]],
    ]


def test_all_samples_of_a_truncated_trajectory_are_filtered() -> None:
    """A limit that cut an earlier turn, or that ended the trajectory between turns."""
    settings = AlgorithmConfig(overlong_filtering=True)
    early = three_lines(0, 1, 2, reasons=("length", "stop"))
    between = replace(three_lines(1, 1, 2), cause=End.TRUNCATED)
    batch = make_batch([early, between, three_lines(2, 3)], [], algorithms.get("grpo"), settings, 1)
    filter_overlong(batch, settings)
    assert batch.updates == [[[4]]] and set(batch.sequences.row[batch.sequences.mask].tolist()) == {4}


def test_only_a_cut_sample_is_bootstrapped() -> None:
    """The first sample ended by itself; the last one was cut."""
    settings = PPOConfig(name="ppo", bootstrap_truncated=True)
    batch = make_batch([three_lines(0, 2, 2, reasons=("stop", "length"))], [], algorithms.get("ppo"), settings, 1)
    batch.sequences.values = torch.arange(8.0)
    found = step_input(batch, algorithms.get("ppo"), settings).bootstrap
    assert found is not None and found.tolist() == [0.0, 7.0]


def test_a_reward_model_reads_the_answer() -> None:
    """The answer follows the first turn; the sample that is listed last ends with a turn written before it."""
    turns = (turn("user", 1), turn("user", 5), turn("model", 6, follows=1), turn("model", 7, 8, follows=0))
    given = trajectory((turns[0], turn("model", 2, follows=0), *turns[1:2], turn("model", 6, follows=2)))
    context, response = given.answered()
    assert (context.tolist(), response.tolist()) == ([5], [6])
    given = trajectory((*turns, turn("tool", 9, follows=2)))
    context, response = given.answered()
    assert (context.tolist(), response.tolist()) == ([1], [7, 8])
    assert [*given.samples()][-1].response_ids.tolist() == [6] and given.num_samples == 2


@given(turns=trees())
def test_samples_are_counted_without_making_them(turns: tuple[Turn, ...]) -> None:
    assert trajectory(turns).num_samples == len([*trajectory(turns).samples()])


def test_pairs_are_of_whole_trajectories() -> None:
    members = [trajectory(TWO_LINES, 0, 1.0), trajectory(one_turn([1], [3]), 1, 0.0)]
    with pytest.raises(NonRetryableError, match=r"algorithm.name=online_dpo .* 2 of them give 3 samples"):
        make_batch(members, [], algorithms.get("online_dpo"), PreferenceConfig(name="online_dpo"), 1)


def test_a_copied_task_shares_nothing_that_changes() -> None:
    class Own:
        values = [1]

    own, image = Own(), b"image"
    extra = {"tools": [{"name": "add"}], "array": np.arange(3), "own": own, "pair": ([1], 2)}
    task = Task(
        "t", "math", ({"role": "user", "content": "1 + 1"},), "math", {"ground_truth": ["2"]}, extra, images=(image,)
    )
    made = task.copy()
    assert made.prompt == task.prompt and made.reward_model == task.reward_model and made.images[0] is image
    made.prompt[0]["content"] += "!"
    made.reward_model["ground_truth"].append("3")
    made.extra_info["tools"][0]["name"] = "sub"
    made.extra_info["array"][0] = 9
    made.extra_info["pair"][0].append(2)
    assert task.prompt[0]["content"] == "1 + 1" and task.reward_model == {"ground_truth": ["2"]}
    assert extra["tools"] == [{"name": "add"}] and extra["array"].tolist() == [0, 1, 2] and extra["pair"] == ([1], 2)
    assert made.extra_info["own"] is not own
