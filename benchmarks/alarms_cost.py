"""CPU-seconds of alarms and of the witness, as a share of a step's: ``python benchmarks/alarms_cost.py [--large]``.

The functions of alarms are wrapped in the process from which the job's processes are forked. Counted on rank 0, in
thread CPU time, beside the CPU time of the whole process. ``--large``: a model of 30M parameters.
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

from megarl.core.processes.fork import Forked, ForkServer
from megarl.exam.processes import ENVIRONMENT, MODULES

LARGE = (
    "model.from_scratch.hidden_size=512", "model.from_scratch.intermediate_size=1536",
    "model.from_scratch.num_hidden_layers=8", "model.from_scratch.num_attention_heads=8",
    "model.from_scratch.num_key_value_heads=4", "model.from_scratch.head_dim=64",
)  # fmt: skip
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


def install() -> None:
    """Wrap the methods of alarms, and write both times with each step's metrics."""
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
    after_step, last = Alarms.after_step, [0.0]

    def written(self: Alarms, state: Any, metrics: dict[str, float]) -> None:
        global spent
        after_step(self, state, metrics)
        now = time.process_time()
        metrics |= {"perf/alarms_cpu_s": spent, "perf/step_cpu_s": now - last[0]}
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
    large = parser.parse_args().large
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["experiment=quickstart", f"trainer.steps={STEPS}", "parallel=tp1"]
        overrides += [f"run.dir={folder}/run", f"trainer.warm_start.steps={5 if large else 100}"]
        overrides += LARGE if large else []
        os.chdir(Path(__file__).parent)  # the fork imports this file by its name
        environment = {**os.environ, **ENVIRONMENT}
        server = ForkServer.start(MODULES, environment)
        pid = server.fork(["-m", "alarms_cost", "job", *overrides], environment, sys.stderr.fileno(), {})
        assert pid is not None and Forked(pid).wait(1800) == 0, "the job failed"
        server.close()
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/alarms_cpu_s" in line][1:]
    alarms, whole = (statistics.mean(line[f"perf/{name}_cpu_s"] for line in steps) for name in ("alarms", "step"))
    name, share = "30M" if large else "quickstart", alarms / whole
    names = sorted({key for line in steps for key in line if key.startswith("perf/cpu_s_of/")})
    for key in names:
        print(f"  {key.rpartition('/')[2]}: {1e3 * statistics.mean(line.get(key, 0.0) for line in steps):.2f} ms")
    print(f"{name}: {1e3 * alarms:.1f} ms of {1e3 * whole:.0f} CPU-ms a step: {share:.2%}")


if __name__ == "__main__":
    job(sys.argv[2:]) if sys.argv[1:2] == ["job"] else main()
