"""Real jobs that sample in turn and ahead, side by side: seconds a step, who waited, and the simulation's forecast.

``python benchmarks/asynchrony.py [--steps N] [--runs DIR] [--write]``. Trainer ranks are pinned to the first core, all
else of a job (engine, explorer, reward workers) to the others. Lengths of responses are drawn (lognormal, by each
trajectory's seed), so every configuration samples the same ones. The rates of three jobs in turn calibrate
``benchmarks/simulation.py``: the first configuration, one with three times the groups, in segments, and one with other
tokens before each response. With ``--runs`` jobs are kept, and those that have ended there are read and not run.
Wants a machine with nothing else on it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import page
import psutil
import simulation

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Store
from megarl.train.rollout.group_part import rollout_id

MEDIAN, P99, MOST = 32, 512, 1024
BUDGET, SEGMENT = 128, 64
"""Tokens of a trajectory from each weights, in partial rollouts; and of a segment there."""
SEGMENTS = f"rollout.segment_tokens={SEGMENT}"
CONTEXT = 384
"""Tokens before each response of the job that shows what a prefill costs."""
WORKFLOW = f"""
import math
from random import Random


async def workflow(task, model):
    "Samples as many tokens as the seed says, on and on where the model ends before."
    model.ask(task)
    if CONTEXT:
        model.write("user", Random(model.seed).choices(range(5, 50), k=CONTEXT))
    drawn = math.exp(math.log({MEDIAN}) + {np.log(P99 / MEDIAN) / simulation.Z99} * Random(model.seed).gauss(0, 1))
    missing = min(max(round(drawn), 1), {MOST})
    while missing:
        turn = await model.generate(max_tokens=missing)
        missing -= len(turn)
        if missing:
            model.write("user", [5])
"""
AHEAD = ("algorithm.correction=truncate",)


@dataclass(frozen=True)
class Configuration:
    """A way to sample: a job's settings, and the same for the simulation."""

    overrides: tuple[str, ...]
    schedule: simulation.Schedule


CONFIGURATIONS = (
    Configuration((), simulation.Schedule("in turn (k=0)")),
    Configuration(("sync.max_staleness=1", *AHEAD), simulation.Schedule("one step off (k=1, i=1)", Pacing(1, 1))),
    Configuration(
        ("sync.max_staleness=2", "sync.order=completion", *AHEAD),
        simulation.Schedule("completion (k=2), engines drained", Pacing(2, 1), "completion"),
    ),
    Configuration(
        ("sync.max_staleness=2", "sync.order=completion", "sync.pause=keep", *AHEAD),
        simulation.Schedule("completion (k=2), weights in flight", Pacing(2, 1), "completion", in_flight=True),
    ),
    Configuration(
        ("sync.max_staleness=2", SEGMENTS, f"rollout.budget_tokens={BUDGET}", *AHEAD),
        simulation.Schedule(f"partial rollouts (k=2, {BUDGET} tokens)", Pacing(2, 1), budget=BUDGET, request=SEGMENT),
    ),
)
"""The first one calibrates the simulation, too."""
MORE_GROUPS = 3
"""Times the groups of a step in the other job that does."""


@dataclass(frozen=True)
class Job:
    """Load of a step, and how it is run."""

    groups: int
    size: int
    epochs: int
    """Passes of the trainer over a step, which make its share larger."""

    def overrides(self, run_dir: Path, workflow: Path, steps: int) -> list[str]:
        return [
            "experiment=quickstart",
            "parallel=tp1",
            f"run.dir={run_dir}",
            f"trainer.steps={steps}",
            f"trainer.tasks_per_step={self.groups}",
            f"trainer.ppo_epochs={self.epochs}",
            f"algorithm.group_size={self.size}",
            "trainer.checkpoint_interval=1000",
            "trainer.eval_interval=1000",
            "trainer.warm_start.steps=1",
            "trainer.warm_start.batch_size=8",
            "trainer.max_tokens_per_micro_batch=2048",
            "taskset.train_size=2000",
            "taskset.eval_size=2",
            "taskset.warm_start_size=100",
            "model.from_scratch.max_position_embeddings=2048",
            f"rollout.workflow={workflow}",
            f"rollout.max_response_tokens={MOST}",
            f"rollout.max_trajectory_tokens={2 * MOST - 256}",
            f"rollout.max_num_seqs={4 * self.groups * self.size}",
            f"rollout.concurrent_groups={4 * self.groups}",
        ]


@dataclass(frozen=True)
class Measured:
    """A job's steps that count."""

    step_s: float
    trainer_idle: float
    engines_idle: float
    """Share of the time in which no response was generated."""
    tokens: list[float]
    """Of each step, as the following."""
    longest: list[float]
    generation_s: list[float]
    """Seconds in which its responses were generated."""
    answer_s: list[float]
    """Seconds of its rollout without those."""
    sync_s: list[float]
    rest_s: list[float]
    requests: list[float]
    """Requests that engines were asked for in each step."""
    context: list[float]
    """Tokens that stand before the responses of each step, its prompts aside."""
    lengths: list[int]
    """Tokens of every response of the job, in the order in which they were asked for: few steps of a long-tailed
    distribution have a mean of their own."""
    request_tokens: float
    """Mean tokens of a request."""


def pin(job: subprocess.Popen[bytes], cores: list[int], ended: threading.Event) -> None:
    """Keep trainer ranks on the first core and the job's other processes on the others."""
    while not ended.wait(0.2):
        with suppress(psutil.Error):
            for process in psutil.Process(job.pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    wanted = cores[:1] if "megarl.run.start trainer" in " ".join(process.cmdline()) else cores[1:]
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, wanted)


def run(run_dir: Path, overrides: list[str]) -> None:
    """Run a job to its end, pinned, where it has not ended before. Raises RuntimeError with its output."""
    ended_with = run_dir.parent / "ended_with.json"
    if ended_with.is_file():
        if json.loads(ended_with.read_text()) != overrides:
            raise RuntimeError(f"{run_dir} was run with other settings: remove it, or give another --runs")
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"{len(cores)} core: trainer and engines need one of their own")
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "megarl", "train", *overrides], stdout=output, stderr=subprocess.STDOUT
        )
        ended = threading.Event()
        thread = threading.Thread(target=pin, args=(job, cores, ended))
        thread.start()
        try:
            status = job.wait()
        finally:
            ended.set()
            thread.join()
        if status:
            output.seek(0)
            raise RuntimeError(f"a job ended with {status}:\n{output.read().decode(errors='replace')}")
    ended_with.write_text(json.dumps(overrides))


def read(run_dir: Path, first: int, count: int, segment: int | None, context: float) -> Measured:
    """Read ``count`` steps of a job from number ``first`` on, counted from 0, in segments of so many tokens, with
    ``context`` tokens before the responses of each."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "rollout/tokens/sampled" in r][first : first + count]
    spans = {name: _spans(run_dir, name) for name in ("trainer_0", "explorer-0")}
    own = [span[2:] for span in spans["trainer_0"] if span[0] == "step"][first : first + count]
    began, ended = own[0][0], own[-1][1]
    generating = [span for span in spans["explorer-0"] if span[0] == "generation"]
    generations = [
        covered([span[2:] for span in generating if span[1] == rollout_id(step)])
        for step in range(first, first + count)
    ]
    rollouts, syncs = ([r[f"timing_s/{name}"] for r in steps] for name in ("rollout", "sync"))
    every = _responses(run_dir)
    asked = every[first : first + count]
    requests = [
        float(sum(math.ceil(tokens / (segment or tokens)) for turns in of_step for tokens in turns))
        for of_step in asked
    ]
    tokens = [float(sum(map(sum, of_step))) for of_step in asked]
    return Measured(
        (ended - began) / len(own),
        statistics.fmean(r["idle/trainer"] for r in steps),
        1 - covered([span[2:] for span in generating], began, ended) / (ended - began),
        tokens,
        [float(max(map(sum, of_step))) for of_step in asked],
        generations,
        [rollout - generation for rollout, generation in zip(rollouts, generations, strict=True)],
        syncs,
        [r["timing_s/step"] - rollout - sync for r, rollout, sync in zip(steps, rollouts, syncs, strict=True)],
        requests,
        [context] * len(steps),
        [sum(turns) for of_step in every for turns in of_step],
        sum(tokens) / sum(requests),
    )


def _responses(run_dir: Path) -> list[list[list[int]]]:
    """Tokens of each turn of the model, of the responses of each rollout."""
    store, found = Store(f"sqlite:///{run_dir}/store.db", read_only=True), list[list[list[int]]]()
    while trajectories := store.groups.trajectories(rollout_id(len(found))):
        found.append([[len(turn.token_ids) for turn in e.turns if turn.author == "model"] for e in trajectories])
    store.close()
    return found


def _spans(run_dir: Path, process: str) -> list[tuple[str, str, float, float]]:
    """(phase, rollout, start, end) of a process's timeline."""
    lines = (run_dir / "timeline" / f"{process}.jsonl").read_text().splitlines()
    return [(r["phase"], r.get("rollout", ""), r["start"], r["start"] + r["seconds"]) for r in map(json.loads, lines)]


def covered(spans: list[tuple[float, float]], began: float = 0.0, ended: float = math.inf) -> float:
    """Seconds of a time that some span covers."""
    total, until = 0.0, began
    for start, end in sorted(spans):
        start, end = max(start, until), min(end, ended)
        total += max(end - start, 0.0)
        until = max(until, end)
    return total


def calibrated(in_turn: Measured, others: Sequence[Measured], slots: int) -> simulation.Rates:
    """Rates of jobs in turn, by least squares over their steps with coefficients of 0 or more.

    Generation takes ``token_s`` for each token of the longest response, ``row_s`` for each token of all, ``begin_s``
    for each request and ``prefill_s`` for each token before a response; an update so much and so much for each token.
    """
    jobs = (in_turn, *others)
    token_s, row_s, begin_s, prefill_s = _fit(
        [
            ([list(terms) for terms in zip(job.longest, job.tokens, job.requests, job.context, strict=True)],
             job.generation_s)
            for job in jobs
        ]
    )  # fmt: skip
    # With tokens before its responses, an update has more to compute for each of these.
    update_s, update_token_s = _fit(
        [([[1.0, n] for n in job.tokens], job.rest_s) for job in jobs if not job.context[0]]
    )
    return simulation.Rates(
        1, slots, token_s, row_s, update_s, update_token_s, statistics.fmean(in_turn.sync_s),
        prefill_s=prefill_s, begin_s=begin_s, answer_s=statistics.fmean(in_turn.answer_s),
    )  # fmt: skip


def _fit(jobs: Sequence[tuple[list[list[float]], list[float]]]) -> list[float]:
    """Least squares of (terms, seconds) of the steps of jobs, with coefficients of 0 or more: of all choices of terms
    whose coefficients are, the one with the least error. Errors are shares of the mean step of their job: with shares
    of each step's own seconds, long steps would be forecast too short."""
    scales = np.concatenate([np.full(len(seconds), 1 / np.mean(seconds)) for _, seconds in jobs])
    terms = np.concatenate([np.array(terms) for terms, _ in jobs]) * scales[:, None]
    seconds = np.concatenate([seconds for _, seconds in jobs]) * scales
    best, least = np.zeros(terms.shape[1]), math.inf
    for chosen in itertools.product((False, True), repeat=terms.shape[1]):
        columns = terms[:, list(chosen)]
        found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        error = float(((columns @ found - seconds) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(terms.shape[1]), error
            best[list(chosen)] = found
    return [float(x) for x in best]


def forecast(
    rates: simulation.Rates, job: Job, schedule: simulation.Schedule, steps: int, measured: Measured
) -> simulation.Result:
    """The simulation's, of the job's own responses: of so many steps after those that the job, too, did not count."""
    responses = itertools.cycle(measured.lengths)  # at its end a job asks for no more groups, and the simulation does

    def lengths(draw: np.random.Generator, count: int) -> np.ndarray:
        return np.array(list(itertools.islice(responses, count)), dtype=np.int64)

    each = round(measured.request_tokens)
    schedule = replace(schedule, request=min(each, schedule.request or each))
    return simulation.Simulation(rates, simulation.Load(job.groups, job.size, lengths), schedule).run(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each job that count")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--runs", type=Path, help="folder of the jobs; a temporary one where it is not given")
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    job, text = Job(arguments.groups, arguments.size, arguments.epochs), page.Text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).absolute()

        def measure(job: Job, configuration: Configuration, context: int = 0) -> Measured:
            schedule = configuration.schedule
            own = folder / "_".join(re.findall("[a-z0-9]+", schedule.name))
            own.mkdir(parents=True, exist_ok=True)
            run_dir, workflow = own / "run", own / "derived.py"
            workflow.write_text(f"CONTEXT = {context}\n{WORKFLOW}")
            first = schedule.pacing.max_staleness + 2
            steps = first + arguments.steps + schedule.pacing.max_staleness
            run(run_dir, [*job.overrides(run_dir, workflow, steps), *configuration.overrides])
            before = float(context * job.groups * job.size)
            found = read(run_dir, first, arguments.steps, schedule.request, before)
            print(f"{schedule.name}: {found.step_s:.2f} s a step", flush=True)
            return found

        more = replace(job, groups=MORE_GROUPS * job.groups)
        segmented = measure(
            more, Configuration((SEGMENTS,), simulation.Schedule("in turn in segments", request=SEGMENT))
        )
        after = measure(job, Configuration((), simulation.Schedule("in turn after a context")), CONTEXT)
        results = [(configuration, measure(job, configuration)) for configuration in CONFIGURATIONS]
    in_turn = results[0][1]
    rates = calibrated(in_turn, [segmented, after], 4 * job.groups * job.size)
    text.say(
        f"{job.groups} groups of {job.size} responses a step, lognormal lengths (median {MEDIAN}, 99th percentile "
        f"{P99}, at most {MOST}); {arguments.steps} steps of each job."
    )
    text.say(
        f"Rates of jobs in turn: {rates.token_s * 1e3:.2f} ms a decoding step, {rates.row_s * 1e3:.3f} ms for each row "
        f"in it, {rates.begin_s * 1e3:.2f} ms for a request and {rates.prefill_s * 1e3:.3f} ms for a token that is "
        f"computed again; {rates.answer_s:.2f} s of a rollout without generation; an update {rates.update_s:.2f} s "
        f"and {rates.update_token_s * 1e3:.3f} ms a token; a sync {rates.publish_s:.2f} s."
    )
    text.say("")
    text.say("| schedule | s a step | of in turn | trainer idle | engines idle | simulated, s | distance |")
    text.say("|---|---:|---:|---:|---:|---:|---:|")
    for configuration, found in results:
        simulated = forecast(rates, job, configuration.schedule, arguments.steps, found)
        text.say(
            f"| {configuration.schedule.name} | {found.step_s:.2f} | {found.step_s / in_turn.step_s:.2f} | "
            f"{found.trainer_idle:.0%} | {found.engines_idle:.0%} | {simulated.step_s:.2f} | "
            f"{simulated.step_s / found.step_s - 1:+.0%} |"
        )
    if arguments.write:
        page.write("benchmarks/asynchrony.md", str(text))


if __name__ == "__main__":
    main()
