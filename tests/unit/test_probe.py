"""The comparison of a probe text's log-probs."""

from __future__ import annotations

import math

import pytest

from megarl.core.errors import WeightsDiffer
from megarl.engines.client.probe import PROBE_TOLERANCES, Probed, check_probe

BF16 = PROBE_TOLERANCES["bfloat16"]


def test_a_rounding_of_an_unlikely_token_is_no_difference() -> None:
    """Numbers of a run in bfloat16."""
    found = check_probe(Probed([-13.613411, -0.5]), [-13.671363, -0.5], BF16)
    assert found.position == 0 and found.max_difference == pytest.approx(0.057952)


def test_as_much_is_one_of_likely_tokens() -> None:
    with pytest.raises(WeightsDiffer, match=r"5\.80e-02 .* on average, .* at token [12] .*sync\.probe_tolerance=0\.05"):
        check_probe(Probed([-0.557952, -0.442048]), [-0.5, -0.5], BF16)


def test_one_token_may_be_further_off_but_not_far() -> None:
    trainer = [-0.5] * 16
    assert check_probe(Probed([-0.65, *trainer[1:]]), trainer, BF16).position == 0
    with pytest.raises(WeightsDiffer, match=r"at token 1 \(engine -0\.710000, .*of one token 4 times as much"):
        check_probe(Probed([-0.71, *trainer[1:]]), trainer, BF16)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(WeightsDiffer, match="at token 2"):
        check_probe(Probed([-0.5, math.nan]), [-0.5, -0.5], BF16)


def test_decode_is_compared_with_prefill_and_named() -> None:
    probed = Probed([-1.0], [-2.0, -3.0], [-2.0, -3.0005])
    assert check_probe(probed, [-1.0], 1e-3).max_difference == 0.0
    words = r"2 tokens that the engine decoded .*\(token 2: -3\.000000 and -3\.100000\).*captured graph that reads old"
    with pytest.raises(WeightsDiffer, match=words):
        check_probe(probed._replace(again=[-2.0, -3.1]), [-1.0], 1e-3)


def test_one_decoded_token_may_be_further_off_than_all_of_them() -> None:
    """As with another expert in bfloat16."""
    decode, again = [-1.0] * 8, [-1.0] * 7 + [-1.3]
    assert check_probe(Probed([-1.0], decode, again), [-1.0], BF16).max_difference == 0.0
    with pytest.raises(WeightsDiffer, match="8 tokens that the engine decoded"):
        check_probe(Probed([-1.0], decode, [-1.1] * 8), [-1.0], BF16)
