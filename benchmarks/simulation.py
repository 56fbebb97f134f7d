"""Trainer and engines of a job that samples ahead, as a discrete-event simulation: seconds a step and idle shares.

``python benchmarks/simulation.py [--engines 64 256 1024] [--steps N] [--write]``. Which groups are asked for and taken
is decided by the job's own ``buffer/order/pacing.py``; time is what is simulated.

An engine decodes its rows together: a token of each takes ``token_s + row_s`` · rows. Rows wait in one queue, the
oldest group first, and go to the engine with the fewest rows. Lengths are drawn; prompts cost nothing but for rows that
go on after their KV cache was reset (``prefill_s`` a token), and ``begin_s`` for each request, spread over its tokens.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import page

from megarl.buffer.order.pacing import Pacing, choose

MEDIAN, P99 = 32, 512
"""Tokens of a response."""
MOST = 1024
"""Longest response."""
Z99 = 2.3263478740408408
"""Standard normal quantile of 0.99."""
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(draw: np.random.Generator, count: int, *, median: int = MEDIAN, p99: int = P99) -> np.ndarray:
    """int64 [count]: tokens of responses, 1 to MOST."""
    values = np.exp(math.log(median) + math.log(p99 / median) / Z99 * draw.standard_normal(count))
    return np.clip(np.rint(values), 1, MOST).astype(np.int64)


def pareto(draw: np.random.Generator, count: int) -> np.ndarray:
    """int64 [count]: the same median and 99th percentile, with a tail that falls by a power; 1 to MOST."""
    alpha = math.log(50) / math.log(P99 / MEDIAN)
    values = MEDIAN / 2 ** (1 / alpha) * draw.random(count) ** (-1 / alpha)
    return np.clip(np.rint(values), 1, MOST).astype(np.int64)


@dataclass(frozen=True)
class Rates:
    """Speeds of the two sides, in seconds."""

    engines: int
    slots: int
    """Rows that an engine decodes at once."""
    token_s: float
    """Seconds of a decoding step, without those of its rows."""
    row_s: float
    """Seconds of each row in a decoding step."""
    update_s: float
    """Seconds of a step's inference and updates, without those of its tokens."""
    update_token_s: float
    """Seconds of each response token in them."""
    publish_s: float
    """Seconds for which an engine is paused for new weights."""
    at_once: int | None = None
    """Engines that are given weights at once in flight; None for all. The trainer is busy until the last one has
    them."""
    prefill_s: float = 0.0
    """Seconds of each token of a row whose KV cache was reset."""
    begin_s: float = 0.0
    """Seconds of decoding that an engine loses for each request."""
    answer_s: float = 0.0
    """Seconds from the end of a group to its step in the trainer, and from the trainer's request to its first row:
    rewards, the store, and looking there."""

    def engine_seconds(self, tokens: float) -> float:
        """Seconds of one engine, all of whose slots are in use."""
        return tokens * (self.token_s / self.slots + self.row_s)

    def update_seconds(self, tokens: float) -> float:
        """Seconds of the trainer for a step."""
        return self.update_s + self.update_token_s * tokens


@dataclass(frozen=True)
class Load:
    """Work of a step."""

    groups: int
    size: int
    lengths: Lengths


@dataclass(frozen=True)
class Schedule:
    """A way for trainer and engines to wait for each other."""

    name: str
    pacing: Pacing = field(default_factory=Pacing)
    order: Literal["admission", "completion"] = "admission"
    in_flight: bool = False
    """Weights change while rows run; otherwise requests that run are awaited, and no others begin."""
    budget: int | None = None
    """Tokens that a trajectory samples between two publications; then it is suspended until the next one. None for all.
    Groups of steps that train before the next publication have no budget."""
    request: int | None = None
    """Tokens of a request, of which a response makes one after another (``rollout.segment_tokens``); None for all."""


SCHEDULES = (
    Schedule("in turn (k=0)"),
    Schedule("one step off (k=1, i=1)", Pacing(1, 1)),
    Schedule("partial rollouts (k=1, 256 tokens)", Pacing(1, 1), budget=256),
    Schedule("partial rollouts (k=4, 256 tokens)", Pacing(4, 1), budget=256),
    Schedule("completion (k=1), engines drained", Pacing(1, 1), "completion"),
    Schedule("completion (k=4), engines drained", Pacing(4, 1), "completion"),
    Schedule("completion (k=1), weights in flight", Pacing(1, 1), "completion", in_flight=True),
    Schedule("completion (k=4), weights in flight", Pacing(4, 1), "completion", in_flight=True),
)


@dataclass(eq=False)
class Group:
    """Rows of one task."""

    number: int
    """The step that it was asked for in admission order; in completion order the step in which it was asked for."""
    asked_at: int
    """Steps in the weights that had been published last."""
    left: int
    """Rows that have not ended."""
    tokens: int
    ended_at: float = math.inf


@dataclass(eq=False)
class Row:
    """A response: its group, and tokens that it has and lacks."""

    group: Group
    done: int
    left: int


class Engines:
    """Engines as heaps of the token counts at which their rows end. ``now`` goes on by ``step`` and ``until`` alone."""

    def __init__(self, rates: Rates, ended: Callable[[Row], None], request: int | None = None) -> None:
        self.now, self.busy, self.tokens = 0.0, 0.0, 0
        self.held = False
        """No row begins."""
        self.queue: deque[tuple[Row, int]] = deque()
        """Rows that wait, and how many tokens each samples."""
        self._rates, self.ended, self._request = rates, ended, request
        self._row_s = rates.row_s + (rates.begin_s / request if request else 0.0)
        count = rates.engines
        self._running: list[list[tuple[float, int, Row, int]]] = [[] for _ in range(count)]
        """(count of tokens at which the row ends, serial number, row, its tokens)."""
        self._count, self._at, self._stamp = [0.0] * count, [0.0] * count, [0] * count
        """Tokens that a row that was there all the time has, at a time; number of the engine's newest event."""
        self._loads = [(0, engine) for engine in range(count)]
        self._events: list[tuple[float, int, int]] = []
        """(time, engine, its stamp); a stamp of -1 is a pause."""
        self._serial, self.rows = 0, 0

    def begin(self) -> None:
        """Let rows that wait begin where there are slots."""
        touched = set()
        while self.queue and not self.held and self._loads and self._loads[0][0] < self._rates.slots:
            load, engine = heapq.heappop(self._loads)
            if load != len(self._running[engine]):
                continue
            row, tokens = self.queue.popleft()
            self._settle(engine)
            self._stall(engine, row.done * self._rates.prefill_s + (0.0 if self._request else self._rates.begin_s))
            self._serial += 1
            heapq.heappush(self._running[engine], (self._count[engine] + tokens, self._serial, row, tokens))
            heapq.heappush(self._loads, (load + 1, engine))
            self.rows += 1
            touched.add(engine)
        for engine in touched:
            self._schedule(engine)

    def drain(self, draw: np.random.Generator) -> None:
        """End rows that run with the request that they are in. Where the model ends requests, what one lacks is as long
        as a whole one."""
        if self._request is None:
            return
        for engine, running in enumerate(self._running):
            self._settle(engine)
            for place, (end, serial, row, tokens) in enumerate(running):
                sampled = tokens - (end - self._count[engine])
                whole = min(math.ceil(sampled + draw.exponential(self._request)), tokens)
                running[place] = (end - (tokens - whole), serial, row, whole)
            heapq.heapify(running)
            self._schedule(engine)

    def pause(self, each: int) -> float:
        """Pause engines for new weights, ``each`` at once from now on; return the seconds until the last has them."""
        for engine in range(self._rates.engines):
            heapq.heappush(self._events, (self.now + engine // each * self._rates.publish_s, engine, -1))
        return math.ceil(self._rates.engines / each) * self._rates.publish_s

    def step(self) -> bool:
        """Go on to the next event; False where there is none."""
        if not self._events:
            return False
        self.now, engine, stamp = heapq.heappop(self._events)
        if stamp < 0:
            self._settle(engine)
            self._at[engine] = max(self._at[engine], self.now) + self._rates.publish_s
            if self._rates.prefill_s:
                for end, _, row, tokens in self._running[engine]:
                    done = row.done + tokens - (end - self._count[engine])
                    self._stall(engine, done * self._rates.prefill_s)
            self._schedule(engine)
        elif stamp == self._stamp[engine]:
            self._settle(engine)
            _, _, row, tokens = heapq.heappop(self._running[engine])
            self.rows -= 1
            self.tokens += tokens
            row.done, row.left = row.done + tokens, row.left - tokens
            heapq.heappush(self._loads, (len(self._running[engine]), engine))
            self._schedule(engine)
            self.ended(row)
            self.begin()
        return True

    def until(self, at: float) -> None:
        """Go on to a time."""
        while self._events and self._events[0][0] <= at:
            self.step()
        self.now = at

    def busy_until_now(self) -> float:
        """Seconds in which engines had rows and were not paused, added up."""
        for engine in range(self._rates.engines):
            self._settle(engine)
            self._schedule(engine)
        return self.busy

    def _each(self, engine: int) -> float:
        return self._rates.token_s + self._row_s * len(self._running[engine])

    def _settle(self, engine: int) -> None:
        """Count what the engine has decoded up to now; an engine that is paused or stalled has a later time."""
        passed = self.now - self._at[engine]
        if passed <= 0:
            return
        if self._running[engine]:
            self._count[engine] += passed / self._each(engine)
            self.busy += passed
        self._at[engine] = self.now

    def _stall(self, engine: int, seconds: float) -> None:
        self._at[engine] += seconds
        self.busy += seconds

    def _schedule(self, engine: int) -> None:
        self._stamp[engine] += 1
        if self._running[engine]:
            seconds = max(self._running[engine][0][0] - self._count[engine], 0.0) * self._each(engine)
            heapq.heappush(self._events, (self._at[engine] + seconds, engine, self._stamp[engine]))


@dataclass(frozen=True)
class Result:
    """Means of the steps that were measured."""

    step_s: float
    trainer_idle: float
    """Share of the time in which the trainer waited for groups or for rows that ran."""
    engines_idle: float
    """Share of the engines' time without a row, pauses included."""
    limit_s: float
    """Seconds a step of a job in which neither side waits."""
    staleness: int
    """Largest number of steps by which a group's first weights were behind those of its step."""


class Simulation:
    """One job."""

    def __init__(self, rates: Rates, load: Load, schedule: Schedule, seed: int = 0) -> None:
        self._rates, self._load, self._schedule = rates, load, schedule
        self._draw = np.random.default_rng(seed)
        self.engines = Engines(rates, self._row_ended, schedule.request)
        self._unended: Counter[int] = Counter()
        """Groups that have rows that have not ended, by ``asked_at``."""
        self.ready: list[Group] = []
        """In the order in which they ended."""
        self._whole: Counter[int] = Counter()
        """Groups that have ended, by number."""
        self.suspended: list[Row] = []
        self._asked, self._waited, self._published, self._worked = 0, 0.0, 0, 0.0

    def run(self, steps: int) -> Result:
        """Measure so many steps, after those in which the job comes to sample as far ahead as it may."""
        first = self._schedule.pacing.max_staleness + 2
        tokens = staleness = 0
        began = waited = busy = worked = 0.0
        for step in range(first + steps):
            if step == first:
                began, waited, worked, busy = (
                    self.engines.now, self._waited, self._worked, self.engines.busy_until_now()
                )  # fmt: skip
            if self._schedule.pacing.publishes(step):
                self._publish(step)
            groups = self.take(step)
            of_step = sum(group.tokens for group in groups)
            self._work(self._rates.update_seconds(of_step))
            if step >= first:
                tokens += of_step
                staleness = max(staleness, *(step - group.asked_at for group in groups))
        count, passed = steps, self.engines.now - began
        sampling = self._rates.engine_seconds(tokens / count) / self._rates.engines
        engines = self.engines.busy_until_now() - busy
        limit = max((self._worked - worked) / count, sampling)
        idle = 1 - engines / (passed * self._rates.engines)
        return Result(passed / count, (self._waited - waited) / passed, idle, limit, staleness)

    def _publish(self, step: int) -> None:
        """Give the engines the weights of ``step`` steps, and ask for the groups that may be asked for then."""
        engines, schedule = self.engines, self._schedule
        if step:
            if not schedule.in_flight:
                # In admission order all that was asked for is awaited (or suspended); else requests that run.
                if schedule.order == "completion":
                    engines.held = True
                    engines.drain(self._draw)
                self._wait(lambda: engines.rows == 0 and (engines.held or not engines.queue))
            at_once = self._rates.at_once if schedule.in_flight else None
            seconds = engines.pause(at_once or self._rates.engines)
            if not schedule.in_flight:
                self._work(seconds)
                engines.held = False
        self._published = step
        rows = [*self.suspended, *(row for row, _ in engines.queue), *self._ask(step)]
        self.suspended.clear()
        rows.sort(key=lambda row: row.group.number)
        engines.queue = deque((row, min(row.left, self._budget(row.group, step))) for row in rows)
        engines.begin()
        if step and schedule.in_flight:
            self._work(seconds)

    def _budget(self, group: Group, step: int) -> int:
        limit = self._schedule.budget
        return MOST if limit is None or group.number < step + self._schedule.pacing.interval else limit

    def _ask(self, step: int) -> Iterator[Row]:
        """New groups; their rows."""
        pacing, load = self._schedule.pacing, self._load
        if self._schedule.order == "admission":
            numbers = [n for n in range(self._asked, pacing.asked(step)) for _ in range(load.groups)]
            self._asked = pacing.asked(step)
        else:
            missing = (pacing.deadline(step) + 1 - step) * load.groups - self._unended.total() - len(self.ready)
            numbers = [step] * missing
        lengths = load.lengths(self._draw, len(numbers) * load.size).reshape(len(numbers), load.size)
        for number, own in zip(numbers, lengths.tolist(), strict=True):
            group = Group(number, step, load.size, sum(own))
            self._unended[step] += 1
            yield from (Row(group, 0, length) for length in own)

    def take(self, step: int) -> list[Group]:
        """Wait for the step's groups."""
        found: list[Group] = []

        def complete() -> bool:
            if self._schedule.order == "admission":
                if self._whole[step] == self._load.groups:
                    found[:] = [group for group in self.ready if group.number == step]
            elif len(self.ready) >= self._load.groups and self._may_be_left(step):
                deadline, each = self._schedule.pacing.deadline, self._load.groups
                due = [deadline(group.asked_at) for group in self.ready]
                others = [deadline(asked_at) for asked_at in self._unended.elements()]
                found[:] = [self.ready[number] for number in choose(due, others, step, each, each)]
            return len(found) == self._load.groups

        self._wait(complete, lambda: len(self.ready))
        answered = max(group.ended_at for group in found) + self._rates.answer_s
        if answered > self.engines.now:
            self._waited += answered - self.engines.now
            self.engines.until(answered)
        taken = {id(group) for group in found}
        self.ready = [group for group in self.ready if id(group) not in taken]
        return found

    def _may_be_left(self, step: int) -> bool:
        """True if steps after this one can take all groups that have not ended in time: ``choose`` is slow."""
        room = 0
        for asked_at in range(step - self._schedule.pacing.max_staleness, step + 1):
            room -= self._unended[asked_at]
            if room < 0:
                return False
            room += self._load.groups
        return True

    def _wait(self, there: Callable[[], bool], changes: Callable[[], int] | None = None) -> None:
        """Go on until ``there()``, looked at again when ``changes()`` has another value."""
        began, seen = self.engines.now, changes() if changes else 0
        done = there()
        while not done:
            assert self.engines.step(), "a job that waits for rows, and none runs"
            if changes is None or changes() != seen:
                seen, done = changes() if changes else 0, there()
        self._waited += self.engines.now - began

    def _work(self, seconds: float) -> None:
        self._worked += seconds
        self.engines.until(self.engines.now + seconds)

    def _row_ended(self, row: Row) -> None:
        if row.left:
            self.suspended.append(row)
            return
        row.group.left -= 1
        if not row.group.left:
            self._unended[row.group.asked_at] -= 1
            self.ready.append(row.group)
            row.group.ended_at = self.engines.now
            self._whole[row.group.number] += 1


def balanced(rates: Rates) -> Rates:
    """Rates with a trainer that needs as long for a step's tokens as the engines."""
    return replace(rates, update_token_s=rates.engine_seconds(1) / rates.engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rows", type=int, default=2, help="responses of a step for each slot")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    text = page.Text()
    text.say(
        f"Engines of {arguments.slots} rows at once, 10 ms a decoding step and 0.2 ms for each row in it; 20 µs for "
        "each token that is computed again after new weights; 1 s for a publication. A step has "
        f"{arguments.rows} responses for each row of all engines, in groups of 16. The trainer needs as long for a "
        f"step's tokens as engines whose rows are all in use. Means of {arguments.steps} steps, after k + 2 others. "
        "Limit: the longer of what the trainer works in a step (publication included) and what full engines need for "
        "its tokens."
    )
    text.say("")
    for name, lengths in (("lognormal", lognormal), ("power law", pareto)):
        text.say(f"Lengths: {name}, median {MEDIAN}, 99th percentile {P99}, at most {MOST} tokens.")
        text.say("")
        text.say("| engines | schedule | s a step | of the limit | trainer idle | engines idle | staleness |")
        text.say("|---:|---|---:|---:|---:|---:|---:|")
        for engines in arguments.engines:
            load = Load(engines * arguments.slots * arguments.rows // 16, 16, lengths)
            rates = balanced(Rates(engines, arguments.slots, 0.01, 0.0002, 0.0, 0.0, 1.0, prefill_s=2e-5))
            for schedule in SCHEDULES:
                found = Simulation(rates, load, schedule).run(arguments.steps)
                text.say(
                    f"| {engines} | {schedule.name} | {found.step_s:.1f} | {found.limit_s / found.step_s:.0%} | "
                    f"{found.trainer_idle:.0%} | {found.engines_idle:.0%} | {found.staleness} |"
                )
        text.say("")
    if arguments.write:
        page.write("benchmarks/simulation.md", str(text))


if __name__ == "__main__":
    main()
