"""Where the CPU-seconds of a start, a step and the test suite go, by process and by function.

``python benchmarks/cpu.py [start step suite] [--write]`` writes into docs/benchmarks/cpu.md. Seconds of processes are
those that the kernel has counted. Functions are sampled by py-spy, which gets an environment of its own in
``runs/cpu/venv``: a sample belongs to the innermost function of megarl, or to the package that is being imported.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import page
import psutil
from jobs import last_of_each, steps_done

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "cpu"
PY_SPY = "py-spy==0.4.3"
JOB = ("experiment=quickstart", "trainer.warm_start.steps=20", "taskset.eval_size=100")
STEPS = (5, 25)
"""The steps between which is counted."""
RATE = {"start": 100, "step": 100, "suite": 3}
"""Samples a second."""
SHOWN = 12
"""Functions of a process that are printed."""
KINDS = {
    "supervisor": r"megarl (train|bench)",
    "fork server": r"fork\.main\(\)|processes\.fork",
    "trainer rank": r"run\.start trainer",
    "explorer": r"run\.start explorer",
    "engine's server": r"engines\.server\.server",
    "engine's core": r"EngineCore|VLLM::",
    "reward worker": r"pool\.worker",
    "reaper": r"process\.reaper",
    "pytest": r"pytest|tests\.together",
}
"""Kinds of processes by their command line."""


Found = tuple[Mapping[str, float], float, Path]
"""CPU-seconds by kind, seconds of the clock, py-spy's folded stacks."""


def kind_of(command: str) -> str:
    """Kind of a process: the first of ``KINDS`` that its command line matches."""
    return next((name for name, words in KINDS.items() if re.search(words, command)), "others")


def function_of(frames: Sequence[str]) -> str:
    """Return the function, or the import, that a sample counts for. Frames are ``function (file:line)``, the outermost
    first."""
    modules = [frame for frame in frames if frame.startswith("<module> (")]
    if any("<frozen importlib" in frame for frame in frames) and modules:
        package = re.sub(r"[/.(:].*", "", modules[-1].removeprefix("<module> ("))
        return f"import of `{package}`"
    ours = [frame for frame in frames if re.search(r"\((megarl|tests|benchmarks)/", frame)]
    if not ours:
        return f"`{frames[-1].partition(' (')[0]}`" if frames else "its start"
    function = re.sub(r":[0-9]+\)$", ")", ours[-1])
    return f"`{function}`"


def functions(raw: Iterable[str]) -> dict[str, Counter[str]]:
    """Samples of each kind of process by function, from py-spy's folded stacks."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in raw:
        stack, _, number = line.rpartition(" ")
        frames = stack.split(";")
        processes = [frame for frame in frames if frame.startswith("process ")]
        kind = kind_of(processes[-1] if processes else "")
        found[kind][function_of([f for f in frames if not f.startswith(("process ", "thread "))])] += int(number)
    return found


class Ticks:
    """CPU-seconds of a process and its descendants, by kind. An ended process keeps its last count."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._last: dict[tuple[int, float], tuple[str, float]] = {}
        self._since: dict[tuple[int, float], float] = {}

    def look(self) -> None:
        """Take the counts of all processes that live."""
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                times, key = process.cpu_times(), (process.pid, process.create_time())
                self._last[key] = (kind_of(" ".join(process.cmdline())), times.user + times.system)
            except psutil.Error:
                continue

    def begin(self) -> None:
        """Count from now on."""
        self.look()
        self._since = {key: seconds for key, (_, seconds) in self._last.items()}

    def by_kind(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for key, (kind, seconds) in self._last.items():
            found[kind] += seconds - self._since.get(key, 0.0)
        return found


def py_spy() -> Path:
    """py-spy, in an environment that is made at the first use."""
    program = RUNS / "venv" / "bin" / "py-spy"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", RUNS / "venv"], check=True)
        subprocess.run([program.with_name("pip"), "install", "-q", PY_SPY], check=True)
    return program


@contextmanager
def sampled(pid: int, rate: int, output: Path):
    """Sample a process and all below it while the block runs; folded stacks are in ``output`` afterwards."""
    command = [py_spy(), "record", "--subprocesses", "--nonblocking", "-r", str(rate), "-f", "raw", "-o", output]
    spy = subprocess.Popen([*command, "--pid", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        spy.send_signal(signal.SIGINT)
        spy.wait(60)


def job(name: str, overrides: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a job in a new directory."""
    run_dir = RUNS / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "megarl", "train", *last_of_each([*JOB, *overrides]), f"run.dir={run_dir}"]
    with (RUNS / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log), run_dir


def while_runs(process: subprocess.Popen[bytes], ticks: Ticks, until: Callable[[], bool]) -> None:
    """Count until the condition holds. Raises RuntimeError when the command ends before."""
    while not until():
        if process.poll() is not None:
            raise RuntimeError(f"it ended with status {process.returncode}; see {RUNS}")
        ticks.look()
        time.sleep(0.05)
    ticks.look()


def measured(name: str, overrides: Sequence[str], first: int, last: int) -> Found:
    """CPU-seconds of a job from its step ``first`` (0: from the command) to step ``last``, counted in one run and
    sampled in another."""
    raw, found = RUNS / f"{name}.raw", []
    for spied in (False, True):
        began = time.monotonic()
        process, run_dir = job(name, [*overrides, "trainer.eval_interval=1000"])
        ticks = Ticks(process.pid)
        if first:
            while_runs(process, ticks, lambda folder=run_dir: steps_done(folder) >= first)
            ticks.begin()
            began = time.monotonic()
        with sampled(process.pid, RATE[name], raw) if spied else nullcontext():
            while_runs(process, ticks, lambda folder=run_dir: steps_done(folder) >= last)
            found.append((ticks.by_kind(), time.monotonic() - began))
        process.wait()
    return (*found[0], raw)


def start() -> Found:
    """CPU-seconds from the command to the end of the first step, a warm start of one step included."""
    return measured("start", ["trainer.steps=1", "trainer.tasks_per_step=8", "trainer.warm_start.steps=1"], 0, 1)


def step() -> Found:
    """CPU-seconds of a step of the quickstart, evaluations left out."""
    first, last = STEPS
    spent, seconds, raw = measured("step", [f"trainer.steps={last + 2}"], first, last)
    number = last - first
    return {kind: value / number for kind, value in spent.items()}, seconds / number, raw


def suite() -> Found:
    """CPU-seconds of ``make test``; those of each test are in ``runs/cpu/suite.jsonl``."""
    counted = RUNS / "suite.jsonl"
    counted.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.together", "-p", "tests.cpu_seconds"]
    environment = {**os.environ, "MEGARL_CPU_SECONDS": str(counted)}
    with (RUNS / "suite.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    ticks = Ticks(process.pid)
    with sampled(process.pid, RATE["suite"], RUNS / "suite.raw"):
        while process.poll() is None:
            ticks.look()
            time.sleep(0.5)
    from tests.cpu_seconds import read, sums

    folders = {f"`{name}`": cpu for name, (cpu, _, _) in sums(read(counted), "folder").items()}
    return folders, time.monotonic() - began, RUNS / "suite.raw"


def table(text: page.Text, spent: Mapping[str, float], sampled_as: Mapping[str, Counter[str]]) -> None:
    """A row a process kind, and what its samples were in."""
    whole = sum(spent.values())
    text.say("| | CPU-seconds | share |")
    text.say("|---|---|---|")
    for kind, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        text.say(f"| {kind} | {seconds:.2f} | {seconds / whole:.0%} |")
    text.say(f"| all | {whole:.2f} | |")
    text.say("")
    text.say("| process | function | share of its samples |")
    text.say("|---|---|---|")
    for kind, found in sorted(sampled_as.items(), key=lambda item: -item[1].total()):
        for function, number in found.most_common(SHOWN):
            if number >= 0.02 * found.total():
                text.say(f"| {kind} | {function} | {number / found.total():.0%} |")
    text.say("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"start": start, "step": step, "suite": suite}
    parser.add_argument("parts", nargs="*", help="start, step, suite; by default the first two")
    parser.add_argument("--write", action="store_true", help="also write into docs/benchmarks/cpu.md")
    options = parser.parse_args()
    if unknown := set(options.parts) - parts.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    RUNS.mkdir(parents=True, exist_ok=True)
    for name in options.parts or ["start", "step"]:
        text = page.Text()
        spent, seconds, raw = parts[name]()
        text.say(f"## {name}")
        text.say("")
        text.say((parts[name].__doc__ or "").strip() + f" Clock: {seconds:.2f} s.")
        text.say("")
        table(text, spent, functions(raw.read_text().splitlines()) if raw.is_file() else {})
        if options.write:
            page.write("benchmarks/cpu.md", str(text), f"benchmarks/cpu.py {name}")


if __name__ == "__main__":
    main()
