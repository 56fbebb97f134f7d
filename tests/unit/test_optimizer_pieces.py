"""Shares of data-parallel ranks in a parameter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.checkpoint.training.rank_state import ParameterPiece, pieces_of, writer_of


def test_pieces_by_hand() -> None:
    assert pieces_of(3, 7, 10) == [ParameterPiece(0, 0, 4)]
    assert pieces_of(8, 23, 10) == [ParameterPiece(0, 0, 2), ParameterPiece(1, 2, 12), ParameterPiece(2, 12, 15)]
    assert writer_of(pieces_of(8, 23, 10)) == 1
    assert writer_of(pieces_of(5, 15, 10)) == 0, "the first of equal ones"
    assert pieces_of(10, 20, 10) == [ParameterPiece(1, 0, 10)]


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 50))
def test_pieces_are_the_parameter_once_and_each_is_its_ranks(start: int, size: int, share: int) -> None:
    pieces = pieces_of(start, start + size, share)
    assert [n for piece in pieces for n in range(piece.start, piece.end)] == list(range(size))
    for piece in pieces:
        assert piece.size > 0
        assert {(start + n) // share for n in range(piece.start, piece.end)} == {piece.rank}
