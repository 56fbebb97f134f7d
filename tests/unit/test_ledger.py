"""What is on a device in each phase, and the fewest models that must leave it to fit a budget."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import Config, ReferenceConfig, TrainerConfig
from megarl.learn.memory.ledger import ENGINE_KV_CACHE, ENGINE_WEIGHTS, FIRST_TO_LEAVE, Ledger, human
from megarl.learn.memory.phases import TRAINED, WITH_ENGINES, Phase, PhasePlan, Place
from tests.conftest import examples

STEP = tuple(phase for phase in Phase if phase is not Phase.START)
NAMES = tuple(f"{role}.{kind}" for role in ("actor", "critic") for kind in TRAINED)
TEACHER = "teachers.a"
ORDER = (TEACHER, *FIRST_TO_LEAVE)
ALL = (
    *NAMES,
    "reference.parameters",
    "reward_model.parameters",
    f"{TEACHER}.parameters",
    ENGINE_WEIGHTS,
    ENGINE_KV_CACHE,
)
STAYS = PhasePlan.of(Config())
RANK = {
    "actor.parameters": 2,
    "actor.gradients": 4,
    "actor.optimizer": 12,
    "reference.parameters": 2,
    ENGINE_WEIGHTS: 2,
    ENGINE_KV_CACHE: 30,
}


def test_each_phase_has_its_residents_and_the_rest_where_the_plan_puts_it() -> None:
    plan = PhasePlan.of(Config(trainer=TrainerConfig(offload="memory"), reference=ReferenceConfig(offload="disk")))
    ledger = Ledger(plan, [RANK], colocated=True)
    found = {each.phase: (each.total, each.memory, each.disk) for each in ledger}
    assert found == {
        Phase.SYNC: (2 + 32, 12, 2),  # gradients are nowhere
        Phase.REFRESH: (4, 12, 0),
        Phase.ROLLOUT: (32, 14, 2),
        Phase.OLD_LOGP: (2, 12, 2),
        Phase.REF_LOGP: (2, 14, 0),
        Phase.UPDATE: (18, 0, 2),
        Phase.SAVE: (14, 0, 2),  # a reference that is not renewed is in no checkpoint
        Phase.START: (18, 0, 2),
    }
    assert ledger.at(Phase.ROLLOUT, 0).device == {ENGINE_WEIGHTS: 2, ENGINE_KV_CACHE: 30}
    assert ledger.largest().phase is Phase.SYNC


def test_engines_elsewhere_are_left_out() -> None:
    separate = Ledger(STAYS, [RANK])
    assert {each.total for each in separate} == {20}
    colocated = Ledger(STAYS, [RANK], colocated=True)
    assert colocated.most(Phase.SYNC).total == colocated.most(Phase.ROLLOUT).total == 52
    assert colocated.most(Phase.UPDATE).total == 20


def test_weights_that_engines_keep_are_in_host_memory() -> None:
    ledger = Ledger(STAYS, [RANK], colocated=True, keeps_weights=True)
    assert {each.phase for each in ledger if each.memory == 2} == {*ledger.of_job} - WITH_ENGINES
    assert ledger.most(Phase.SYNC).total == 52 and ledger.most(Phase.UPDATE).total == 20


def test_each_phase_is_that_of_its_largest_rank() -> None:
    ledger = Ledger(STAYS, [{"actor.parameters": 5}, {"actor.parameters": 3, "actor.optimizer": 4}, {}])
    assert {each.rank for each in ledger} == {1}
    away = Ledger(PhasePlan.of(Config(trainer=TrainerConfig(offload="memory"))), ledger.ranks)
    assert (away.most(Phase.SYNC).rank, away.most(Phase.UPDATE).rank) == (0, 1)


def test_a_table_has_a_line_for_each_phase() -> None:
    ranks = [{"actor.parameters": 3 * 2**30, "actor.optimizer": 2**20, "actor.gradients": 0}]
    plan = PhasePlan.of(Config(trainer=TrainerConfig(offload="memory")))
    assert Ledger(plan, ranks, phases=(Phase.SYNC, Phase.ROLLOUT, Phase.VALUES)).table().splitlines() == [
        "phase    rank    device    memory  disk  on the device",
        "sync        0  3.00 GiB  1.00 MiB   0 B  actor.parameters 3.00 GiB",
        "rollout     0       0 B  3.00 GiB   0 B  nothing",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (80 * 2**30 - 1, "80.0 GiB"),
        (999 * 2**20, "999 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_have_three_digits(size: int, text: str) -> None:
    assert human(size) == text


def test_one_byte_less_moves_another_role_and_at_last_nothing_helps() -> None:
    ledger = Ledger(STAYS, [RANK], colocated=True)
    assert ledger.nearest(52) == STAYS
    without_reference = ledger.nearest(51)
    assert without_reference is not None and without_reference.away["reference"] is Place.MEMORY
    assert without_reference.away["actor"] is Place.DEVICE
    only_actor = ledger.nearest(36)
    assert only_actor is not None and only_actor.away["actor"] is Place.MEMORY
    assert only_actor.away["reference"] is Place.DEVICE
    both = ledger.nearest(35)
    assert both is not None and ledger.nearest(34) == both and ledger.nearest(33) is None


plans = st.builds(
    PhasePlan,
    st.fixed_dictionaries({role: st.sampled_from([Place.DEVICE, Place.MEMORY, Place.DISK]) for role in ORDER}),
)
ranks = st.lists(
    st.fixed_dictionaries(
        {"actor.parameters": st.integers(0, 9)}, optional={name: st.integers(0, 9) for name in ALL[1:]}
    ),
    min_size=1,
    max_size=3,
)
ledgers = st.builds(
    Ledger,
    plans,
    ranks,
    st.booleans(),
    st.sampled_from([tuple(Phase), STEP, (Phase.SYNC, Phase.ROLLOUT), (Phase.UPDATE,)]),
)


def by_hand(ledger: Ledger, away: frozenset[str]) -> int:
    """Most bytes of a device when the roles of ``away`` leave it; the phases' needs are written again here."""
    needs = {
        Phase.SYNC: {"actor.parameters", ENGINE_WEIGHTS, ENGINE_KV_CACHE},
        Phase.REFRESH: {"actor.parameters", "reference.parameters"},
        Phase.ROLLOUT: {ENGINE_WEIGHTS, ENGINE_KV_CACHE},
        Phase.SCORES: {"reward_model.parameters"},
        Phase.OLD_LOGP: {"actor.parameters"},
        Phase.REF_LOGP: {"reference.parameters"},
        Phase.TEACHERS: {f"{TEACHER}.parameters"},
        Phase.VALUES: {"critic.parameters"},
        Phase.UPDATE: set(NAMES),
        Phase.SAVE: set(NAMES) - {"actor.gradients", "critic.gradients"} | {"reference.parameters"},
        Phase.START: {name for name in NAMES if name.startswith("actor.")},
        Phase.CRITIC: {"actor.parameters", "reward_model.parameters"} | {n for n in NAMES if n.startswith("critic.")},
        Phase.LOAD: {"reference.parameters"} | {name for name in NAMES if name.startswith("critic.")},
    }
    asked = {Phase.REFRESH: "reference.parameters", Phase.SCORES: "reward_model.parameters"}
    asked |= {Phase.REF_LOGP: "reference.parameters", Phase.TEACHERS: "teachers."} | dict.fromkeys(
        (Phase.VALUES, Phase.CRITIC, Phase.LOAD), "critic"
    )
    largest = 0
    for phase in ledger.phases:
        if not any(name.startswith(asked.get(phase, "actor")) for rank in ledger.ranks for name in rank):
            continue
        for rank in ledger.ranks:
            total = 0
            for name, size in rank.items():
                role = name.rpartition(".")[0]
                if role == "engine":
                    there = ledger.colocated and name in needs[phase]
                else:
                    there = role not in away or name in needs[phase]
                total += size * there
            largest = max(largest, total)
    return largest


@settings(max_examples=examples(300, 20000))
@given(ledgers, st.integers(0, 60))
def test_the_nearest_plan_is_the_first_with_the_fewest_changes(ledger: Ledger, budget: int) -> None:
    here = {name.rpartition(".")[0] for rank in ledger.ranks for name in rank}
    roles = [role for role in ORDER if role in here]
    present = frozenset(role for role, place in ledger.plan.away.items() if place is not Place.DEVICE)
    assert ledger.largest().total == by_hand(ledger, present)
    assert ledger.fits(budget) is (by_hand(ledger, present) <= budget)
    fitting = []
    for leaves in product((True, False), repeat=len(roles)):  # back to the device, too
        away = frozenset(role for role, leave in zip(roles, leaves, strict=True) if leave) | (present - set(roles))
        if by_hand(ledger, away) <= budget:
            changed = away ^ present
            fitting.append((len(changed), [role not in changed for role in ORDER], away))
    found = ledger.nearest(budget)
    if not fitting:
        assert found is None
        return
    fewest, _, away = min(fitting, key=lambda each: each[:2])
    assert found is not None
    assert {role for role, place in found.away.items() if place is not Place.DEVICE} == away
    assert sum(found.away[role] is not ledger.plan.away[role] for role in ORDER) == fewest


@settings(max_examples=examples(200, 5000))
@given(ledgers)
def test_the_least_budget_is_refused_with_one_byte_less(ledger: Ledger) -> None:
    least = by_hand(ledger, frozenset(ORDER))
    assert ledger.nearest(least) is not None
    assert ledger.nearest(least - 1) is None
    assert ledger.fits(ledger.largest().total) and not ledger.fits(ledger.largest().total - 1)
