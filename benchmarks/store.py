"""Time of the store's calls whose work must not grow with what the store holds, on SQLite, small beside large.

``python benchmarks/store.py [--write]``. Six cases: the steps of a job that has used many groups, an evaluation as an
explorer's thread for the store goes through it, a rollout that is asked for among many tasks, the success of a step's
tasks after many steps, long responses in segments beside whole ones, and a second's long responses, written and read. A
ratio near 1 is a call that takes as long in the larger store. Times are the thread's CPU time, which other work on the
machine changes least; waits for the disk are not in it, but in the seconds of the whole.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import page
from sqlalchemy import event

from megarl.buffer.store import Claim, EndedGroup, Store, Used
from megarl.buffer.store.codec import segment_to_row, trajectory_to_row
from megarl.buffer.store.tables import GROUPS, ROLLOUTS, TRAJECTORIES
from megarl.core.schema import Reward, Segment, Task, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.explore.explorer.other_explorers import record_evaluations

USED = (1_024, 1_024_000)
HELD_OUT = (2_000, 20_000)
TASKS = (30_000, 300_000)
STEPS = (4, 40)
ASKED = 512
"""Groups of a rollout for training, and of a step."""
CAPACITY = 64
"""Samples that the explorer has under way."""
FIRST = 50
"""Groups that are claimed one at a time while nearly all are pending."""
TOKENS = 200
LONG, SEGMENTS = 4096, (2048, 512, 128)
"""Tokens of a long response, and of a segment of it."""
MEMBERS, GROUPS_A_STEP = 8, 128
"""Of steps whose trajectories have ``LONG`` tokens."""
ROUNDS = 9
VERSION = WeightsVersion(1, 0)
WORKER = "explorer"
PROMPT = np.arange(100, dtype=np.int32)
RESPONSE = np.arange(TOKENS, dtype=np.int32)
LOGP = np.full(TOKENS, -0.5, np.float32)


@contextmanager
def opened() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{Path(folder) / 'store.db'}", outage_s=60.0)
        try:
            yield store
        finally:
            store.close()


def tasks(split: str, number: int) -> list[Task]:
    prompt = ({"role": "user", "content": "A question of about a hundred characters. " * 3},)
    return [Task(f"{split}/{i}", "benchmark", prompt, "math", {"ground_truth": str(i)}) for i in range(number)]


def answers(claim: Claim) -> list[Trajectory]:
    """Whole groups, every second answer right."""
    spans = (WeightsSpan(0, TOKENS, claim.version),)
    response = Turn("model", RESPONSE, follows=0, logp=LOGP, spans=spans, finish_reason="stop")
    turns = (Turn("user", PROMPT), response)
    rewards = (Reward(1.0, "ok"), Reward(0.0, "wrong"))
    return [
        Trajectory(
            claim.rollout_id,
            claim.task.task_id,
            claim.group_id,
            index,
            claim.group_size,
            turns,
            rewards[(claim.position + index) % 2],
        )
        for index in claim.indices
    ]


class Clock:
    """CPU seconds of every call, by name, and the seconds of all together."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.elapsed = 0.0

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        start, began = time.thread_time(), time.perf_counter()
        result = function(*arguments, **settings)
        self.seconds[name].append(time.thread_time() - start)
        self.elapsed += time.perf_counter() - began
        return result


def evaluation(number: int) -> Clock:
    """An evaluation from its request to its event: the calls that trainer and explorer make."""
    clock = Clock()
    with opened() as store:
        store.tasks.add("eval", tasks("eval", number))
        ids = store.tasks.ids("eval")
        clock.call(
            "request_rollout", store.rollouts.request, "eval-0", "eval", 0, VERSION, ids, 1, {"temperature": 0.0}
        )
        for _ in range(FIRST):
            clock.call("one claim", store.groups.claim, WORKER, 1)
        store.groups.release(WORKER)
        while claims := clock.call("claim_groups", store.groups.claim, WORKER, CAPACITY, max_samples=CAPACITY):
            for claim in claims:
                assert clock.call("put", store.groups.put, claim, answers(claim), {"samples": 1.0})
                clock.call("record_evaluations", record_evaluations, store, WORKER, claim.rollout_id)
        assert store.evaluations.read("eval-0")["tasks"] == number and store.rollouts.is_complete("eval-0")
    clock.seconds["last record_evaluations"] = [clock.seconds["record_evaluations"].pop()]
    return clock


def requests(number: int) -> float:
    """Median CPU seconds of a rollout that is asked for."""
    clock = Clock()
    with opened() as store:
        store.tasks.add("train", tasks("train", number))
        ids = store.tasks.ids("train")
        for i in range(ROUNDS):
            wanted = [ids[place] for place in np.random.default_rng(i).permutation(number)[:ASKED]]
            clock.call("", store.rollouts.request, f"rl-{i}", "train", i, VERSION, wanted, 8, {"temperature": 1.0})
    return statistics.median(clock.seconds[""])


def successes(steps: int) -> float:
    """Median CPU seconds of the success of the newest step's tasks, after ``steps`` steps."""
    clock = Clock()
    with opened() as store:
        store.tasks.add("train", tasks("train", ASKED))
        ids = store.tasks.ids("train")
        for step in range(steps):
            store.rollouts.request(f"rl-{step}", "train", step, VERSION, ids, 2, {"temperature": 1.0})
            for claim in store.groups.claim(WORKER, ASKED):
                assert store.groups.put(claim, answers(claim))
            store.journal.record_step(step + 1, {}, Used(tuple(store.groups.take(ASKED, step=step))))
        for _ in range(ROUNDS):
            assert len(clock.call("", store.groups.successes, steps - 1, steps)) == ASKED
    return statistics.median(clock.seconds[""])


def steps_after(number: int) -> dict[str, float]:
    """Call -> median CPU seconds of it in a step, in a store with so many groups that steps have used."""
    clock = Clock()
    with opened() as store:
        store.tasks.add("train", tasks("train", ASKED))
        ids, done = store.tasks.ids("train"), number // ASKED
        for step in range(done):
            store.rollouts.request(f"train-{step:06d}", "train", step, VERSION, ids, 1, {})
        with store.database._writer.begin() as connection:  # as if each had been claimed, put and recorded
            used = GROUPS.update().where(ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id)
            connection.execute(used.values(state="consumed", used_by=ROLLOUTS.c.step + 1, ended_at=0.0))
            rows = [trajectory_to_row(answers(claim)[0]) for claim in claims_on(done, ids[0])]
            for row in rows:  # one answer of each group, without its tokens
                others = [row | {"group_id": f"{row['rollout_id']}/{i}", "tensors": b""} for i in range(ASKED)]
                connection.execute(TRAJECTORIES.insert(), others)
        for step in range(done, done + ROUNDS):
            store.pacing.record_version(WeightsVersion(1, step), step)
            clock.call(
                "request_rollout", store.rollouts.request, f"train-{step:06d}", "train", step, VERSION, ids, 2, {}
            )
            while claims := clock.call("claim_groups", store.groups.claim, WORKER, CAPACITY, max_samples=2 * CAPACITY):
                ended = [EndedGroup(claim, answers(claim)) for claim in claims]
                clock.call("put_all", store.groups.put_all, ended)
            clock.call("unused", store.pacing.unused)
            groups = clock.call("take", store.groups.take, ASKED, step=step)
            clock.call("parts", store.groups.parts, groups)
            clock.call("record_step", store.journal.record_step, step + 1, {}, Used(tuple(groups)))
    return {name: statistics.median(seconds) for name, seconds in clock.seconds.items()}


def segmented(size: int | None) -> tuple[float, int]:
    """Wall seconds for each trajectory of ``LONG`` tokens from its claim until its group is ready, and bytes of its
    segments. The segments of all trajectories end together, as those of an engine's batch do."""
    clock, written = Clock(), 0
    tokens, logp = np.arange(LONG, dtype=np.int32), np.full(LONG, -0.5, np.float32)
    with opened() as store:
        store.tasks.add("train", tasks("train", CAPACITY))
        ids = store.tasks.ids("train")
        for step in range(ROUNDS):
            store.rollouts.request(f"rl-{step}", "train", step, VERSION, ids, 1, {})
            claims = clock.call("claim", store.groups.claim, WORKER, CAPACITY)
            for start in range(0, LONG, size or LONG):
                end = start + (size or LONG)
                spans = (WeightsSpan(0, end - start, VERSION),)
                part = Segment(0, 0, start, "0" * 16, tokens[start:end], logp[start:end], spans)
                if size is not None:
                    assert all(clock.call("append", store.segments.append, [(claim, part) for claim in claims]))
                    row = segment_to_row("", "", part)
                    written += len(claims) * (len(row["record"]) + len(row["tensors"]))
            ended = [EndedGroup(claim, [with_tokens(answers(claim)[0], tokens, logp)]) for claim in claims]
            assert all(clock.call("put", store.groups.put_all, ended))
    return clock.elapsed / (ROUNDS * CAPACITY), written // (ROUNDS * CAPACITY)


def throughput() -> tuple[dict[str, float], int]:
    """Call -> wall seconds for each trajectory of ``LONG`` tokens, in one process; bytes of the database for each."""
    rng, clock = np.random.default_rng(0), Clock()
    tokens = rng.integers(0, 150_000, LONG, dtype=np.int32)
    logp = -rng.exponential(0.5, LONG).astype(np.float32)
    total = ROUNDS * GROUPS_A_STEP * MEMBERS
    found: dict[str, float] = {}
    with opened() as store:
        store.tasks.add("train", tasks("train", GROUPS_A_STEP))
        ids = store.tasks.ids("train")
        for step in range(ROUNDS):
            store.pacing.record_version(WeightsVersion(1, step), step)
            store.rollouts.request(f"train-{step:06d}", "train", step, VERSION, ids, MEMBERS, {})
            while claims := store.groups.claim(WORKER, CAPACITY, max_samples=CAPACITY * MEMBERS):
                ended = [
                    EndedGroup(claim, [with_tokens(one, rng.permutation(tokens), logp) for one in answers(claim)])
                    for claim in claims
                ]
                before = clock.elapsed
                assert all(clock.call("", store.groups.put_all, ended))
                found["written"] = found.get("written", 0.0) + clock.elapsed - before
            before = clock.elapsed
            groups = clock.call("", store.groups.take, GROUPS_A_STEP, step=step)
            read = clock.call("", store.groups.read, groups)
            clock.call("", store.journal.record_step, step + 1, {}, Used(tuple(groups)))
            assert sum(len(one.turns[1].token_ids) for one in read) == GROUPS_A_STEP * MEMBERS * LONG
            found["taken"] = found.get("taken", 0.0) + clock.elapsed - before
        database = store.database._writer.url.database
        size = sum(path.stat().st_size for path in Path(str(database)).parent.iterdir())
    return {name: seconds / total for name, seconds in found.items()}, size // total


def of_throughput(text: page.Text) -> None:
    seconds, size = throughput()
    both = sum(seconds.values())
    text.say(
        f"{ROUNDS} steps of {GROUPS_A_STEP} groups of {MEMBERS} trajectories of {LONG:,} random tokens, one process, "
        f"seconds of the whole: **{1 / both:,.0f} trajectories/s written and taken** ({1 / seconds['written']:,.0f} "
        f"written, {1 / seconds['taken']:,.0f} taken, with all tokens and log-probs), {size:,} bytes each."
    )


def plans() -> list[tuple[str, str]]:
    """Call -> how SQLite reads the tables in it, a line for each different look at one."""
    found: dict[tuple[str, str], None] = {}
    with opened() as store:
        store.tasks.add("train", tasks("train", ASKED))
        statements: list[tuple[str, Any]] = []
        for engine in (store.database._reader, store.database._writer):
            event.listen(
                engine, "before_cursor_execute", lambda c, cursor, text, values, *_: statements.append((text, values))
            )

        def looked(name: str, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
            statements.clear()
            result = function(*arguments, **settings)
            with sqlite3.connect(str(store.database._writer.url.database)) as database:
                for text, values in statements:
                    if text.startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and not isinstance(values, list):
                        for row in database.execute(f"explain query plan {text}", values):
                            if row[3].startswith(("SEARCH", "SCAN")):
                                found[name, row[3]] = None
            return result

        store.pacing.record_version(VERSION, 0)
        looked(
            "request_rollout",
            store.rollouts.request,
            "train-000000",
            "train",
            0,
            VERSION,
            store.tasks.ids("train"),
            2,
            {},
        )
        claims = looked("claim_groups", store.groups.claim, WORKER, ASKED, max_samples=2 * ASKED)
        looked("put_all", store.groups.put_all, [EndedGroup(claim, answers(claim)) for claim in claims])
        looked("unused", store.pacing.unused)
        groups = looked("take", store.groups.take, ASKED, step=0)
        looked("read", store.groups.read, groups)
        looked("record_step", store.journal.record_step, 1, {}, Used(tuple(groups)))
    return list(found)


def of_plans(text: page.Text) -> None:
    text.say("| call | SQLite's plan (`EXPLAIN QUERY PLAN`) |")
    text.say("|---|---|")
    for name, plan in plans():
        text.say(f"| `{name}` | {plan} |")


def with_tokens(trajectory: Trajectory, tokens: np.ndarray, logp: np.ndarray) -> Trajectory:
    prompt, response = trajectory.turns
    spans = (WeightsSpan(0, len(tokens), VERSION),)
    return replace(trajectory, turns=(prompt, replace(response, token_ids=tokens, logp=logp, spans=spans)))


def of_segments(text: page.Text) -> None:
    text.say(
        f"| `rollout.segment_tokens`, {CAPACITY} trajectories of {LONG:,} tokens at a time | ms a trajectory | ratio | "
        "bytes of its segments |"
    )
    text.say("|---|---:|---:|---:|")
    whole = 0.0
    for size in (None, *SEGMENTS):
        seconds, written = segmented(size)
        whole = whole or seconds
        text.say(f"| {size or 'none'} | {1e3 * seconds:.2f} | {seconds / whole:.1f} | {written:,} |")


def claims_on(rollouts: int, task_id: str) -> Iterator[Claim]:
    """A claim on the first group of each of the first rollouts."""
    task = Task(task_id, "benchmark", (), "math", {})
    for step in range(rollouts):
        name = f"train-{step:06d}"
        yield Claim(name, "train", step, VERSION, f"{name}/0", 0, 1, {}, task, WORKER, "", 1)


def of_steps(text: page.Text, sizes: Sequence[int]) -> None:
    few, many = sizes
    small, large = (steps_after(number) for number in sizes)
    text.say(f"| a call in a step of {ASKED} groups, CPU ms | {few:,} groups used | {many:,} groups used | ratio |")
    text.say("|---|---:|---:|---:|")
    names = {"claim_groups": f"`claim_groups`, {CAPACITY} at a time", "put_all": f"`put_all` of {CAPACITY} groups"}
    for name in small:
        a, b = 1e3 * small[name], 1e3 * large[name]
        text.say(f"| {names.get(name, f'`{name}`')} | {a:.2f} | {b:.2f} | {b / a:.1f} |")


def of_evaluations(text: page.Text, sizes: Sequence[int]) -> None:
    small, large = (evaluation(number) for number in sizes)
    few, many = sizes
    text.say(f"| an evaluation, CPU ms for each group | {few:,} held-out tasks | {many:,} held-out tasks | ratio |")
    text.say("|---|---:|---:|---:|")
    names = {
        "request_rollout": "`request_rollout`",
        "claim_groups": f"`claim_groups`, {CAPACITY} at a time",
        "put": "`put`",
        "record_evaluations": "`record_evaluations` after each group but the last",
        "last record_evaluations": "`record_evaluations` after the last one, which counts",
    }
    for name, shown in names.items():
        a, b = (1e3 * sum(clock.seconds[name]) / number for clock, number in ((small, few), (large, many)))
        text.say(f"| {shown} | {a:.3f} | {b:.3f} | {b / a:.1f} |")
    a, b = (sum(sum(clock.seconds[name]) for name in names) for clock in (small, large))
    of_one, of_many = 1e3 * a / few, 1e3 * b / many
    whole = f"all of these, CPU {a:.1f} and {b:.1f} s, of {small.elapsed:.1f} and {large.elapsed:.1f} s"
    text.say(f"| {whole} | {of_one:.3f} | {of_many:.3f} | {of_many / of_one:.1f} |")
    a, b = (1e3 * statistics.median(clock.seconds["one claim"]) for clock in (small, large))
    text.say(f"| one call of `claim_groups` for one group, nearly all pending | {a:.3f} | {b:.3f} | {b / a:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/benchmarks/store.md")
    options = parser.parse_args()
    evaluation(100)  # warm
    text = page.Text()
    of_steps(text, USED)
    text.say("")
    of_evaluations(text, HELD_OUT)
    text.say("")
    text.say("| call | store | CPU | larger store | CPU | ratio |")
    text.say("|---|---:|---:|---:|---:|---:|")
    for name, measure, (few, many), what in (
        (f"`request_rollout` of {ASKED} groups", requests, TASKS, "tasks"),
        (f"`successes` of one step of {ASKED} groups", successes, STEPS, "steps"),
    ):
        a, b = (1e3 * measure(number) for number in (few, many))
        text.say(f"| {name} | {few:,} {what} | {a:.1f} ms | {many:,} {what} | {b:.1f} ms | {b / a:.1f} |")
    text.say("")
    of_segments(text)
    text.say("")
    of_throughput(text)
    text.say("")
    of_plans(text)
    if options.write:
        page.write("benchmarks/store.md", str(text))


if __name__ == "__main__":
    main()
