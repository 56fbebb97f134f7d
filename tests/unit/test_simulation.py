"""The simulation of ``benchmarks/simulation.py``: closed forms where lengths are equal, bounds where they are drawn."""

from __future__ import annotations

from typing import Any

import asynchrony
import numpy as np
import pytest
import simulation

from megarl.buffer.order.pacing import Pacing

SAMPLING, UPDATE, PUBLISH = 10 * (0.1 + 4 * 0.05), 2.0, 0.5
"""Seconds of four rows of ten tokens that one engine decodes together; of an update; of a publication."""


def equal(draw: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, 10, dtype=np.int64)


@pytest.mark.parametrize("update", [UPDATE, 2 * SAMPLING])
@pytest.mark.parametrize(
    ("pacing", "order", "in_flight"),
    [
        (Pacing(), "admission", False),
        (Pacing(1, 1), "admission", False),
        (Pacing(1, 2), "admission", False),
        (Pacing(1, 1), "completion", False),
    ],
)
def test_equal_lengths_have_a_closed_form(pacing: Pacing, order: Any, in_flight: bool, update: float) -> None:
    """One engine: in turn the two add up; one step ahead the longer one counts; two steps in turn publish once."""
    rates = simulation.Rates(1, 4, 0.1, 0.05, update, 0.0, PUBLISH)
    found = simulation.Simulation(
        rates, simulation.Load(1, 4, equal), simulation.Schedule("", pacing, order, in_flight)
    ).run(41)
    if pacing == Pacing():
        step, waits, samples = PUBLISH + SAMPLING + update, SAMPLING, SAMPLING
    elif pacing == Pacing(1, 2):
        # groups of two steps are sampled one after the other, the second while the first is trained
        step = (PUBLISH + SAMPLING + max(SAMPLING, update) + update) / 2
        waits, samples = (SAMPLING + max(SAMPLING - update, 0)) / 2, SAMPLING
    else:
        step, waits, samples = PUBLISH + max(SAMPLING, update), max(SAMPLING - update, 0), SAMPLING
    assert found.step_s == pytest.approx(step, rel=0.03)
    assert found.trainer_idle == pytest.approx(waits / step, abs=0.02)
    assert found.engines_idle == pytest.approx(1 - samples / step, abs=0.02)
    assert found.staleness == pacing.max_staleness


@pytest.mark.parametrize("update", [UPDATE, 2 * SAMPLING])
def test_an_answer_is_waited_for_where_nothing_hides_it(update: float) -> None:
    """In turn it adds to each step; one step ahead it passes while weights are published."""
    rates = simulation.Rates(1, 4, 0.1, 0.05, update, 0.0, PUBLISH, answer_s=0.25)
    for pacing in (Pacing(), Pacing(1, 1)):
        found = simulation.Simulation(rates, simulation.Load(1, 4, equal), simulation.Schedule("", pacing)).run(41)
        step = PUBLISH + (SAMPLING + 0.25 + update if pacing == Pacing() else max(SAMPLING, update))
        assert found.step_s == pytest.approx(step, rel=0.03)


def test_rates_are_found_again_in_the_times_that_they_make() -> None:
    dice = np.random.default_rng(5)

    def job(groups: int, context: float, request: int) -> asynchrony.Measured:
        lengths = [simulation.lognormal(dice, 8 * groups) for _ in range(8)]
        tokens, longest = [float(of.sum()) for of in lengths], [float(of.max()) for of in lengths]
        requests = [float(sum(-(-n // request) for n in of.tolist())) for of in lengths]
        seconds = [
            5e-3 * most + 4e-4 * n + 2e-3 * asked + 6e-5 * context
            for n, most, asked in zip(tokens, longest, requests, strict=True)
        ]
        rest = [0.4 + 3e-4 * n for n in tokens]
        return asynchrony.Measured(
            0.0, 0.0, 0.0, tokens, longest, seconds, [0.3] * 8, [0.2] * 8, rest, requests, [context] * 8, [], 0.0
        )

    rates = asynchrony.calibrated(job(4, 0.0, 1024), [job(12, 0.0, 16), job(4, 6144.0, 1024)], slots=64)
    found = [rates.token_s, rates.row_s, rates.begin_s, rates.prefill_s, rates.update_s, rates.update_token_s]
    assert found == pytest.approx([5e-3, 4e-4, 2e-3, 6e-5, 0.4, 3e-4])
    assert (rates.answer_s, rates.publish_s) == pytest.approx((0.3, 0.2))


def test_no_job_is_faster_than_its_limit_or_trains_older_groups() -> None:
    rates = simulation.Rates(4, 8, 0.01, 0.001, 0.1, 0.0005, 0.05, prefill_s=1e-4)
    load, found = simulation.Load(8, 8, simulation.lognormal), {}
    for schedule in simulation.SCHEDULES:
        job = simulation.Simulation(rates, load, schedule, seed=3)
        result = found[schedule.name] = job.run(24)
        assert result.step_s >= result.limit_s * 0.97, schedule.name
        assert result.staleness <= schedule.pacing.max_staleness
        assert 0 <= result.trainer_idle < 1 and 0 <= result.engines_idle < 1
    seconds = {name: result.step_s for name, result in found.items()}
    assert seconds["completion (k=4), weights in flight"] < seconds["in turn (k=0)"] / 1.5
    assert simulation.Simulation(rates, load, simulation.SCHEDULES[0], seed=3).run(24) == found["in turn (k=0)"]


@pytest.mark.parametrize(
    "schedule",
    [
        simulation.Schedule("a budget", Pacing(2, 1), budget=20),
        simulation.Schedule("a drain", Pacing(2, 1), "completion", request=20),
    ],
    ids=lambda schedule: schedule.name,
)
def test_what_suspends_rows_loses_no_token(schedule: simulation.Schedule) -> None:
    """Every token of the trained groups was sampled once; rows of the step that trains next have no budget."""
    rates = simulation.Rates(2, 4, 0.01, 0.001, 0.1, 0.0, 0.05)
    job = simulation.Simulation(rates, simulation.Load(4, 4, simulation.lognormal), schedule)
    trained: list[Any] = []
    take, ended, suspended = job.take, job.engines.ended, 0

    def ending(row: simulation.Row) -> None:
        nonlocal suspended
        suspended += row.left > 0
        ended(row)

    def taking(step: int) -> list[Any]:
        found = take(step)
        trained.extend(found)
        assert schedule.order == "completion" or all(group.number == step for group in found)
        return found  # type: ignore[no-any-return]

    job.take, job.engines.ended = taking, ending
    job.run(12)
    assert suspended > 0 and len(trained) == (12 + 2 + 2) * 4 and all(group.left == 0 for group in trained)
    assert job.engines.tokens >= sum(group.tokens for group in trained)
    job.engines.held = True
    while job.engines.step():
        pass
    rows = [row for row, _ in job.engines.queue] + job.suspended
    unended = sum(row.left for row in rows)
    waiting = sum(group.tokens for group in {row.group for row in rows})
    unended_groups = {id(row.group) for row in rows}
    whole = sum(group.tokens for group in [*trained, *job.ready] if id(group) not in unended_groups)
    assert job.engines.tokens == whole + waiting - unended


def test_a_drain_waits_for_requests_alone() -> None:
    """Rows of several requests go on with the next weights, so that a publication comes sooner."""
    rates = simulation.Rates(2, 16, 0.01, 0.001, 0.1, 0.0005, 0.05)
    load = simulation.Load(4, 4, simulation.lognormal)
    whole, cut = (
        simulation.Simulation(rates, load, simulation.Schedule("", Pacing(2, 1), "completion", request=request)).run(60)
        for request in (None, 20)
    )
    assert cut.step_s < 0.9 * whole.step_s and cut.staleness <= 2


def test_drawn_lengths_have_the_median_and_the_percentile() -> None:
    for lengths in (simulation.lognormal, simulation.pareto):
        values = lengths(np.random.default_rng(1), 200_000)
        assert np.median(values) == pytest.approx(32, rel=0.04)
        assert np.percentile(values, 99) == pytest.approx(512, rel=0.05)
        assert values.min() >= 1 and values.max() <= simulation.MOST
