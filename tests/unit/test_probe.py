"""The comparison of a probe text's log-probs."""

from __future__ import annotations

import pytest

from megarl.core.errors import WeightsDiffer
from megarl.engine.client.probe import PROBE_TOLERANCES, Probed, check_probe

BF16 = PROBE_TOLERANCES["bfloat16"]


def test_a_rounding_of_an_unlikely_token_is_no_difference() -> None:
    """Numbers of a run in bfloat16."""
    found = check_probe(Probed([-13.613411, -0.5]), [-13.671363, -0.5], BF16)
    assert found.position == 0 and found.max_difference == pytest.approx(0.057952)


def test_as_much_is_one_of_a_likely_token() -> None:
    with pytest.raises(WeightsDiffer, match=r"token 2 .*more than sync\.probe_tolerance=0\.05 of max\(1, its size\)"):
        check_probe(Probed([-13.613411, -0.442048]), [-13.671363, -0.5], BF16)


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
