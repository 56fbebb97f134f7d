"""Division of what replicas need among data-parallel copies, element by element."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.reshard.plan import Share, shares_of


@given(takers=st.integers(1, 9), copies=st.integers(1, 9), total=st.integers(1, 60))
def test_copies_share_evenly_and_take_no_element_twice(takers: int, copies: int, total: int) -> None:
    """Takers 10, 11 and so on, copies 100, 101 and so on."""
    needing, having = range(10, 10 + takers), range(100, 100 + copies)
    shares = {dst: shares_of(dst, needing, having, total) for dst in needing}
    sent: Counter[int] = Counter({src: 0 for src in having})
    packed: dict[tuple[int, int], set[Share]] = defaultdict(set)
    for dst, mine in shares.items():
        assert mine[0].start == 0
        for element in range(total):
            share = next(share for share in reversed(mine) if share.start <= element)
            assert dst in share.dsts
            sent[share.src] += 1
            packed[share.src, element].add(share)
    assert max(sent.values()) - min(sent.values()) <= 1
    assert all(len(found) == 1 for found in packed.values()), "all that take an element from a copy have one share"
    assert all(found <= set(shares[dst]) for found in packed.values() for share in found for dst in share.dsts)
    assert len(packed) == min(takers, copies) * total
    assert all(
        len({share.src for share in mine}) <= -(-copies // (takers % copies or copies)) + 1 for mine in shares.values()
    )


def test_three_replicas_of_two_copies() -> None:
    """Each copy serves one whole, and half of the third: in one message where both take the same."""
    assert shares_of(10, (10, 11, 12), (0, 1), 8) == [Share(0, 0, (10, 12)), Share(4, 0, (10,))]
    assert shares_of(11, (10, 11, 12), (0, 1), 8) == [Share(0, 1, (11,)), Share(4, 1, (11, 12))]
    assert shares_of(12, (10, 11, 12), (0, 1), 8) == [Share(0, 0, (10, 12)), Share(4, 1, (11, 12))]
