"""Ends of responses, and samples that are equal, or likely, more often than their probabilities allow."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.core.schema import Outcome, Reward
from megarl.learn.batching import Sequences
from megarl.train.inference.sampled_ends import early_ends
from megarl.train.parts.sampling import end_faults, evidence, likeliest, repeats, some_of, whole_responses

END = 9
BOUND = 14.0


def sequences(*rows: tuple[list[int], list[int]], logp: float = -0.5) -> Sequences:
    """Prompt and response of each row."""
    tokens = [token for prompt, response in rows for token in (*prompt, *response)]
    mask = [kept for p, r in rows for kept in (*[False] * (len(p) - 1), *[True] * len(r), False)]
    lengths = torch.tensor([len(p) + len(r) for p, r in rows])
    engine = torch.full((len(tokens),), logp)
    return Sequences(torch.tensor(tokens, dtype=torch.int32), lengths, torch.tensor(mask), engine_logp=engine)


def rows(groups: int, size: int, turns: int = 2) -> list[Outcome]:
    reward = Reward(0.0, "wrong")
    names = [str(group) for group in range(groups) for _ in range(size)]
    return [Outcome("r", name, i, 1, 1, reward, False, None, None, turns) for i, name in enumerate(names)]


def test_a_response_without_an_end_token_and_one_that_goes_on_are_found() -> None:
    given = sequences(([1, END], [3, END]), ([1], [3, 4]), ([1], [3, END, 5, END]))
    without, beyond = end_faults(given, torch.tensor([END]))
    assert without.tolist() == [False, True, False]
    assert beyond.tolist() == [False, False, True]


def test_equal_responses_have_equal_numbers_and_their_log_prob() -> None:
    texts, logp = whole_responses(sequences(([1], [3, END]), ([2, 2], [3, END]), ([1], [4, END]), ([1], [])))
    assert texts[0] == texts[1] != texts[2] and texts[3] == 0
    assert logp.tolist() == [-1.0, -1.0, -1.0, 0.0]


def test_samples_by_their_probabilities_are_silent_and_twins_are_found() -> None:
    chance = random.Random(1)
    of = rows(16, 8)
    odds = {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125}
    for _ in range(50):
        texts = chance.choices(list(odds), list(odds.values()), k=len(of))
        assert evidence(repeats(of, texts, [odds[text] for text in texts])) < BOUND
    many = range(1, 1 << 20)
    texts = [chance.choice(many) for _ in range(16) for _ in range(4) for _ in range(2)]
    assert evidence(repeats(of, texts, [1e-6] * len(of))) < BOUND
    twins = [text for text in texts[::2] for _ in range(2)]
    assert evidence(repeats(of, twins, [1e-6] * len(of))) > BOUND
    assert not repeats(rows(16, 8, turns=4), twins, [1e-6] * len(of))


def test_tokens_likelier_than_they_should_be_are_found() -> None:
    generator = torch.Generator().manual_seed(2)
    odds = torch.rand(2000, 6, generator=generator, dtype=torch.float64).softmax(1).sort(1, descending=True).values
    ids = torch.arange(6).expand(2000, 6)
    kept = odds * (odds.cumsum(1) - odds < 0.8)  # top-p
    fair, truncated = (torch.multinomial(each, 1, generator=generator)[:, 0] for each in (odds, kept))
    some = slice(0, 4)  # the rest of the vocabulary is unknown
    assert likeliest(fair, ids[:, some], odds[:, some]) < BOUND < likeliest(truncated, ids[:, some], odds[:, some])
    assert evidence([(True, 1.0)] * 10) == evidence([]) == 0.0


def test_some_sequences_fit_and_old_tokens_are_left_out() -> None:
    given = sequences(([1], [3, END]), ([1], [3] * 20), ([1], [4, 5, END]))
    given.lag = torch.zeros(len(given.tokens), dtype=torch.int16)
    given.lag[0] = 1
    found = some_of(given, 3, 8)
    assert found is not None and found.lengths.tolist() == [3, 4]
    assert found.mask.tolist() == [False, True, False, True, True, True, False]
    assert some_of(given, 3, 2) is None


@pytest.mark.parametrize("dropped", [False, True])
def test_ends_that_come_earlier_than_their_probabilities_allow_are_found(dropped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.zeros(160, dtype=torch.int64).geometric_(0.2, generator=generator).sort().values
    kept = lengths[: 100 if dropped else 160]
    sampled = torch.cat([torch.tensor([5] * (int(n) - 1) + [9]) for n in kept])
    ids = torch.tensor([[5, 9]]).expand(len(sampled), 2)
    odds = torch.tensor([[0.8, 0.2]], dtype=torch.float64).expand(len(sampled), 2)
    assert (evidence(early_ends(sampled, ids, odds, torch.tensor([9]))) > BOUND) is dropped
