"""Jobs of benchmarks: ``megarl train`` to its end, and results that are kept from an earlier start."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.5


def last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """Each setting once, with the value that is given last: megarl refuses one that is given twice."""
    return tuple({override.partition("=")[0]: override for override in overrides}.values())


def train(run_dir: Path, overrides: Sequence[str], look: Callable[[int], None] = lambda steps: None) -> float:
    """Run a job to its end, its log beside its folder; return the seconds. It saves and ends when this script ends.

    Args:
        look: Called now and then with the steps that are done.

    Raises:
        RuntimeError: it failed, with the last line of its log.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    given = last_of_each([f"run.name={run_dir.name}", *overrides, f"run.dir={run_dir}"])
    started, log = time.monotonic(), run_dir.with_suffix(".log")
    with log.open("ab") as output:
        command = [sys.executable, "-m", "megarl", "train", *given]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, preexec_fn=_end_with_parent)
        try:
            while process.poll() is None:
                look(steps_done(run_dir))
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # it saves what it has
            process.wait()
            raise
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{lines[-1] if lines else 'no output'} (exit status {process.returncode}; {log})")
    return time.monotonic() - started


def kept(result: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """JSON of a file; where it is not there, what ``make`` returns is written to it."""
    if not result.is_file():
        result.write_text(json.dumps(make(), indent=1))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def steps_done(run_dir: Path) -> int:
    """Steps of a run behind its warm start."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    done = 0
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # half a line
        done = record["step"] if "training/global_step" in record else done
    return int(done)
