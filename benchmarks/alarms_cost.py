"""CPU-seconds of alarms as a share of a step's: ``python benchmarks/alarms_cost.py [--large] [--write]``.

The functions of alarms are wrapped in the process from which the job's processes are forked, and counted on rank 0 in
thread CPU time. The process that gives second verdicts is an alarm too. A step's CPU time is that of all processes of
the job, and rank 0's beside it. ``--large``: a model of 30M parameters.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import page
import psutil

from megarl.core.processes.fork import Forked, ForkServer
from megarl.exam.processes import ENVIRONMENT, MODULES
from megarl.rewards import again

LARGE = (
    "model.from_scratch.hidden_size=512", "model.from_scratch.intermediate_size=1536",
    "model.from_scratch.num_hidden_layers=8", "model.from_scratch.num_attention_heads=8",
    "model.from_scratch.num_key_value_heads=4", "model.from_scratch.head_dim=64",
)  # fmt: skip
ROOT = "ALARMS_COST_ROOT"
"""Variable with the id of the benchmark's process, above all processes of the job."""
STEPS = 8
spent = 0.0
"""CPU-seconds in alarms since the last step."""
nested = 0
of_kind: dict[str, float] = {}
"""The same by class."""


def counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the thread's CPU time in the outermost call to ``spent``."""

    name = function.__qualname__.partition(".")[0]

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global spent, nested
        nested, begun = nested + 1, time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            nested -= 1
            if not nested:
                spent += time.thread_time() - begun
                of_kind[name] = of_kind.get(name, 0.0) + time.thread_time() - begun

    return counted


CHECKS = (
    "megarl.train.update.witness", "megarl.train.update.critic_witness", "megarl.train.update.optimizer_witness",
    "megarl.train.update.frozen", "megarl.train.parts.sampling", "megarl.train.parts.compared_turns",
    "megarl.train.parts.resumed", "megarl.train.parts.stored_groups", "megarl.train.parts.verdicts",
    "megarl.train.parts.fixed_reference", "megarl.train.rollout.evaluation_check", "megarl.train.parts.alarms",
)  # fmt: skip
"""Modules whose classes are alarms."""


def of_processes() -> tuple[float, float]:
    """Return the CPU-seconds of all processes of the job, and of the one that gives second verdicts."""
    everything = second = 0.0
    for process in psutil.Process(int(os.environ[ROOT])).children(recursive=True):
        try:
            times, line = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        everything += times.user + times.system
        second += times.user + times.system if again.__name__ in line else 0.0
    return everything, second


def install() -> None:
    """Wrap the methods of alarms, and write the times with each step's metrics."""
    from megarl.train.parts.alarms import Alarms
    from megarl.train.sync import publish

    for module in map(importlib.import_module, CHECKS):
        for kind in [
            one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__
        ]:
            for name, function in list(vars(kind).items()):
                if isinstance(function, FunctionType):
                    setattr(kind, name, counting(function))
    publish.check_sent = counting(publish.check_sent)  # type: ignore[attr-defined]
    after_step, last, of_job = Alarms.after_step, [0.0], [(0.0, 0.0)]

    def written(self: Alarms, state: Any, metrics: dict[str, float]) -> None:
        global spent
        after_step(self, state, metrics)
        now, (everything, second) = time.process_time(), of_processes()
        spent += second - of_job[0][1]
        metrics |= {"perf/alarms_cpu_s": spent, "perf/step_cpu_s": now - last[0]}
        metrics |= {"perf/second_cpu_s": second - of_job[0][1], "perf/job_cpu_s": everything - of_job[0][0]}
        of_job[0] = everything, second
        metrics |= {f"perf/cpu_s_of/{name}": seconds for name, seconds in of_kind.items()}
        spent, last[0] = 0.0, now
        of_kind.clear()

    Alarms.after_step = written  # type: ignore[method-assign]


def job(overrides: list[str]) -> None:
    """Become ``megarl train`` with counted alarms."""
    for module in MODULES:
        importlib.import_module(module)
    install()
    sys.argv = ["megarl", "train", *overrides]
    runpy.run_module("megarl", run_name="__main__", alter_sys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--write", action="store_true", help="write into docs/benchmarks/alarms_cost.md")
    args = parser.parse_args()
    large = args.large
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["experiment=quickstart", f"trainer.steps={3 if large else STEPS}", "parallel=tp1"]
        overrides += [f"run.dir={folder}/run", f"trainer.warm_start.steps={5 if large else 100}"]
        overrides += LARGE if large else []
        sys.argv[0] = __file__  # of the line of ``page.measured``
        os.chdir(Path(__file__).parent)  # the fork imports this file by its name
        environment = {**os.environ, **ENVIRONMENT, ROOT: str(os.getpid())}
        server = ForkServer.start(MODULES, environment)
        pid = server.fork(["-m", "alarms_cost", "job", *overrides], environment, sys.stderr.fileno(), {})
        assert pid is not None and Forked(pid).wait(1800) == 0, "the job failed"
        server.close()
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/alarms_cpu_s" in line][1:]
    alarms, rank, second, whole = (
        statistics.mean(line[f"perf/{name}_cpu_s"] for line in steps) for name in ("alarms", "step", "second", "job")
    )
    text, kinds = page.Text(), sorted({key for line in steps for key in line if key.startswith("perf/cpu_s_of/")})
    text.say(f"| {'30M parameters' if large else 'quickstart'} | CPU-ms a step |")
    text.say("|---|--:|")
    for key in kinds:
        text.say(f"| `{key.rpartition('/')[2]}` | {1e3 * statistics.mean(line.get(key, 0.0) for line in steps):.2f} |")
    text.say(f"| process of second verdicts | {1e3 * second:.2f} |")
    text.say(f"| **alarms** | {1e3 * alarms:.1f} = **{alarms / whole:.2%}** |")
    text.say(f"| rank 0 | {1e3 * rank:.0f} |")
    text.say(f"| all processes of the job | {1e3 * whole:.0f} |")
    if args.write:
        page.write("benchmarks/alarms_cost.md", str(text), f"benchmarks/alarms_cost.py{' large' if large else ''}")


if __name__ == "__main__":
    job(sys.argv[2:]) if sys.argv[1:2] == ["job"] else main()
