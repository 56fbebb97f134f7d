"""Names of processes and their kinds, and the table of jobs."""

from __future__ import annotations

import pytest

from megarl.jobs import ProcessKind, kind_of, unit_of


@pytest.mark.parametrize("kind", ProcessKind)
def test_a_name_gives_its_kind_back(kind: ProcessKind) -> None:
    """So does the stem of a log or a timeline."""
    for name in (kind.label, kind.stem, kind.named(0), kind.named(11), kind.named(2, part=1), kind.log(2, part=1)):
        assert kind_of(name) is kind


def test_names_of_other_processes_have_no_kind() -> None:
    assert [kind_of(name) for name in ("", "reward caller 1", "supervisor", "rank 0")] == [None] * 4


def test_names_are_those_of_the_documents() -> None:
    assert ProcessKind.TRAINER.named(3) == "trainer rank 3" and ProcessKind.TRAINER.log(3) == "trainer_3.log"
    assert ProcessKind.ENGINE.named(2, part=1) == "engine 2 part 2" and ProcessKind.ENGINE.log(2, part=1) == "engine_2_part_2.log"
    assert ProcessKind.REWARD_HOST.named(1) == "reward host 1" and ProcessKind.REWARD_HOST.log(1) == "reward_host_1.log"


def test_parts_of_an_engine_are_one_unit() -> None:
    parts = {unit_of(ProcessKind.ENGINE.named(2, part)) for part in range(3)}
    assert parts == {ProcessKind.ENGINE.named(2)} != {ProcessKind.ENGINE.named(1)}
