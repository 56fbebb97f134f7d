"""megarl beside TRL's GRPOTrainer on the same cores: start, seconds a step, tokens a second, accuracy.

Both begin with the weights of one warm start and have the same rows, reward and settings. TRL has an environment of its
own, which the script makes. Runs take turns, in another order each round. Repeat the command to resume: finished runs
are kept in ``runs/peers/``.

    python benchmarks/peers.py [quickstart|30m] [--rounds N] [--only trl dp2] [--steps N] [--write] [hydra overrides]

Overrides hold for both: TRL's settings follow from megarl's. The warm start has those of taskset and model.
``--write`` writes into docs/benchmarks/peers.md.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page

from megarl.config import Config, compose

ROOT = Path(__file__).resolve().parent.parent
AGAINST = ROOT / "benchmarks" / "against"
RUNS = ROOT / "runs" / "peers"
TRL = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "pyarrow")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CORES = 2
LIMIT_S = 3600
"""Longest run."""


@dataclass(frozen=True)
class Size:
    """A model and its task."""

    threshold: float
    """Accuracy whose time is measured."""
    steps: int
    interval: int
    """Steps between two evaluations."""
    settings: tuple[str, ...]
    """Of warm start and comparison, beyond the quickstart."""


SIZES = {
    "quickstart": Size(0.5, 20, 5, ()),
    "30m": Size(
        0.6,
        10,
        5,
        (
            "model.from_scratch.vocab_size=256",
            "model.from_scratch.hidden_size=512",
            "model.from_scratch.intermediate_size=1408",
            "model.from_scratch.num_hidden_layers=10",
            "model.from_scratch.num_attention_heads=8",
            "model.from_scratch.num_key_value_heads=4",
            "model.from_scratch.head_dim=64",
            "model.from_scratch.max_position_embeddings=320",
            "model.from_scratch.initializer_range=0.02",
            "taskset.generate=benchmarks/against/counting.py",
            "taskset.train_size=2000",
            "taskset.warm_start_size=3000",
            "~taskset.options",
            "rollout.max_prompt_tokens=32",
            "rollout.max_response_tokens=256",
            "trainer.tasks_per_step=8",
            "trainer.warm_start.steps=160",
            "trainer.warm_start.batch_size=32",
            "trainer.warm_start.optimizer.lr=1.0e-3",
            "trainer.warm_start.optimizer.min_lr=1.0e-4",
            "trainer.warm_start.optimizer.decay_steps=160",
            "cluster.stall_s=300",
        ),
    ),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "dp2": ("parallel=dp2",),
    "tp1": ("parallel=tp1", f"trainer.num_threads={CORES}"),
    "tp2": ("parallel=tp2",),
}
"""Grids of megarl's trainer, each on all cores."""
PEER = "trl"


@dataclass(frozen=True)
class Outcome:
    """What one run took. Evaluations are in no step."""

    start: float
    """Seconds from the command until the first evaluation or step can begin."""
    steps: tuple[float, ...]
    tokens: tuple[float, ...]
    """Tokens of each step's responses."""
    evaluations: tuple[tuple[int, float, float], ...]
    """(step, seconds since the command, accuracy)."""
    whole: float

    @property
    def step(self) -> float:
        """Median of all steps but the first, where there are more."""
        return statistics.median(self.steps[1:] or self.steps)

    @property
    def speed(self) -> float:
        """Tokens of responses per second of the steps but the first."""
        at = 1 if len(self.steps) > 1 else 0
        return sum(self.tokens[at:]) / sum(self.steps[at:])

    @property
    def final(self) -> float:
        return self.evaluations[-1][2]

    def reached(self, threshold: float) -> float | None:
        """Seconds from the command to the first evaluation that is as good, itself included."""
        return next((seconds for _, seconds, accuracy in self.evaluations if accuracy >= threshold), None)


# ---------------------------------------------------------------- settings


def shared(size: Size, start: Path, steps: int, extra: Sequence[str] = ()) -> list[str]:
    """megarl's settings of a comparison, without the grid: weights and rows of the warm start in ``start``."""
    data = start / "data"
    return last_of_each(
        [
            "experiment=quickstart",
            *(setting for setting in size.settings if not setting.startswith("trainer.warm_start.")),
            f"model.path={start / 'reference'}",
            f"taskset.train={data / 'train.parquet'}",
            f"taskset.eval={data / 'eval.parquet'}",
            "taskset.warm_start=null",
            "trainer.warm_start.steps=0",
            f"trainer.steps={steps}",
            f"trainer.eval_interval={size.interval if size.interval < steps else 0}",
            f"trainer.checkpoint_interval={steps}",
            *extra,
        ]
    )


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Each setting once, with the value that is given last: megarl refuses one that is given twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def trl_settings(config: Config, folder: Path) -> dict[str, Any]:
    """Arguments of GRPOConfig that make TRL do what megarl does with ``config``.

    Raises ValueError for settings that TRL has no equal of.
    """
    trainer, algorithm, optimizer = config.trainer, config.algorithm, config.trainer.optimizer
    unequal = {
        "algorithm.name": algorithm.name != "grpo",
        "algorithm.aggregation": algorithm.aggregation != "token_mean",
        "algorithm.importance": algorithm.importance != "token",
        "algorithm.kl": (algorithm.kl.estimator, algorithm.kl.place, algorithm.kl.target) != ("k3", "loss", None),
        "algorithm.entropy_coef": bool(algorithm.entropy_coef),
        "model.dtype": config.model.dtype != "float32",
        "trainer.optimizer": bool(optimizer.warmup_steps or optimizer.decay_steps),
        "trainer.updates_per_step": trainer.tasks_per_step * algorithm.group_size % trainer.updates_per_step != 0,
    }
    if refused := [name for name, is_unequal in unequal.items() if is_unequal]:
        raise ValueError(f"TRL has no equal of {', '.join(refused)} as set")
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": trainer.steps * trainer.updates_per_step * trainer.ppo_epochs,
        # One micro-batch is one update: with it "bnpo" is the mean over the tokens of an update.
        "per_device_train_batch_size": trainer.tasks_per_step * algorithm.group_size // trainer.updates_per_step,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": trainer.updates_per_step,
        "num_iterations": trainer.ppo_epochs,
        "loss_type": "bnpo",
        "num_generations": algorithm.group_size,
        "scale_rewards": "group" if algorithm.normalize_by_std else "none",
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "delta": None,
        "beta": algorithm.kl.coef,
        "max_completion_length": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.clip_grad,
        "model_init_kwargs": {"dtype": "float32"},
        "seed": trainer.seed,
        # The fastest that keeps the algorithm.
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": trainer.updates_per_step,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


# ---------------------------------------------------------------- runs


def trl_python() -> Path:
    """Python of TRL's environment, which is made where it is missing."""
    venv = RUNS / "venv"
    python, done = venv / "bin" / "python", venv / "installed.json"
    if not done.is_file() or json.loads(done.read_text()) != list(TRL):
        shutil.rmtree(venv, ignore_errors=True)
        print(f"making {venv} with {', '.join(TRL)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        build = [name.replace("torch==2.13.0", "torch==2.13.0+cpu") for name in TRL]
        if subprocess.run([*pip, *build]).returncode:  # the package index may not carry the CPU build
            subprocess.run([*pip, "--extra-index-url", CPU_INDEX, *build], check=True)
        done.write_text(json.dumps(list(TRL)))
    return python


def execute(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> tuple[float, float]:
    """(wall clock at the command, seconds until its end). Raises RuntimeError naming the log when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            preexec_fn=_end_with_parent,
        )
        try:
            process.wait(LIMIT_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {log}")
    return started, time.time() - started


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def train(folder: Path, overrides: Sequence[str], log: Path) -> tuple[float, float]:
    """``megarl train`` in ``folder``; result as :func:`execute`."""
    command = [sys.executable, "-m", "megarl", "train", f"run.name={folder.name}", f"run.dir={folder}", *overrides]
    return execute(command, log)


def warm_started(size: Size, folder: Path, extra: Sequence[str]) -> Path:
    """A run whose ``reference`` and ``data`` all others begin with; made by a warm start and one step."""
    overrides = last_of_each(
        ["experiment=quickstart", *size.settings, "trainer.steps=1", "trainer.eval_interval=0", *extra]
    )
    done = folder / "peers.json"
    if not done.is_file():
        print(f"warm start in {folder}", flush=True)
        train(folder, overrides, folder.with_suffix(".log"))
        done.write_text(json.dumps(overrides))
    if json.loads(done.read_text()) != overrides:
        raise SystemExit(f"{folder} was made with other settings; remove {folder.parent} to begin again")
    return folder


def run_megarl(folder: Path, overrides: Sequence[str]) -> Outcome:
    started, whole = train(folder, overrides, folder.with_suffix(".log"))
    return of_megarl(_lines(folder / "timeline" / "trainer_0.jsonl"), _lines(folder / "metrics.jsonl"), started, whole)


def run_trl(folder: Path, config: Config) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "model": config.model.path,
        "train": config.taskset.train,
        "eval": config.taskset.eval,
        "marks": str(folder / "marks.jsonl"),
        "steps": config.trainer.steps,
        "updates": config.trainer.updates_per_step * config.trainer.ppo_epochs,
        "interval": config.trainer.eval_interval,
        "threads": CORES,
        "settings": trl_settings(config, folder),
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    command = [str(trl_python()), str(AGAINST / "trl_grpo.py"), str(folder / "spec.json")]
    alone = {"OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, whole = execute(command, folder / "log", alone)
    return of_trl(_lines(folder / "marks.jsonl"), started, whole)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_trl(marks: Sequence[dict[str, Any]], started: float, whole: float) -> Outcome:
    """The outcome that marks of TRL's run tell."""
    [ready] = [mark["time"] for mark in marks if mark["kind"] == "ready"]
    evaluations = [mark for mark in marks if mark["kind"] == "evaluation"]
    return Outcome(
        start=ready - started,
        steps=between(
            [mark["time"] for mark in marks if mark["kind"] == "begin"][0],
            [mark["time"] for mark in marks if mark["kind"] == "step"],
            [(mark["time"] - mark["seconds"], mark["time"]) for mark in evaluations],
        ),
        tokens=tuple(mark["tokens"] for mark in marks if mark["kind"] == "rollout"),
        evaluations=tuple((mark["step"], mark["time"] - started, mark["accuracy"]) for mark in evaluations),
        whole=whole,
    )


def of_megarl(
    phases: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], started: float, whole: float
) -> Outcome:
    """The outcome that timeline and metrics of megarl's run tell."""
    spans = {
        name: [(phase["start"], phase["start"] + phase["seconds"]) for phase in phases if phase["phase"] == name]
        for name in ("step", "evaluation")
    }
    at = {phase["step"]: phase["start"] + phase["seconds"] for phase in phases if phase["phase"] == "evaluation"}
    trained = [record for record in metrics if "training/global_step" in record]
    return Outcome(
        start=min(start for found in spans.values() for start, _ in found) - started,
        steps=between(spans["step"][0][0], [end for _, end in spans["step"]], spans["evaluation"]),
        tokens=tuple(
            record["response_length/mean"] * sum(record[f"ends/{end}"] for end in ("finished", "truncated"))
            for record in trained
        ),
        evaluations=tuple(
            (record["step"], at[record["step"]] - started, record["val/accuracy"])
            for record in metrics
            if "val/accuracy" in record
        ),
        whole=whole,
    )


def between(begin: float, ends: Sequence[float], left_out: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Seconds of each step from the end of the one before, less those of ``left_out`` that lie inside."""
    found = []
    for end in ends:
        found.append(end - begin - sum(stop - start for start, stop in left_out if begin <= start and stop <= end))
        begin = end
    return tuple(found)


# ---------------------------------------------------------------- rounds


def in_turns(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, name) in the order of running: every other round backwards."""
    return [(number, name) for number in range(rounds) for name in (names if number % 2 == 0 else names[::-1])]


def kept(path: Path, make: Callable[[], Outcome]) -> Outcome:
    """A finished run's outcome from its file, or by running it again."""
    if not path.is_file():
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        outcome = make()
        path.write_text(json.dumps(outcome.__dict__))
    record = json.loads(path.read_text())
    return Outcome(
        record["start"],
        tuple(record["steps"]),
        tuple(record["tokens"]),
        tuple((step, seconds, accuracy) for step, seconds, accuracy in record["evaluations"]),
        record["whole"],
    )


def table(outcomes: dict[str, list[Outcome]], threshold: float) -> list[str]:
    """Lines of Markdown: medians over the rounds, with the least and the most where there are several."""
    lines = [
        f"| | start | a step | against TRL | responses, tokens/s | all steps | to {threshold:.0%} held out "
        "| held out, before → after | whole command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    peer = outcomes.get(PEER)
    for name, found in outcomes.items():
        reached = [outcome.reached(threshold) for outcome in found]
        times = [seconds for seconds in reached if seconds is not None]
        missed = f"; not in {len(reached) - len(times)} of {len(reached)}" if len(times) < len(reached) else ""
        ratio = statistics.median(o.step for o in found) / statistics.median(o.step for o in peer) if peer else None
        lines.append(
            f"| {'TRL' if name == PEER else f'megarl, `{name}`'} "
            f"| {spread([o.start for o in found], 1)} s "
            f"| {spread([o.step for o in found], 2)} s "
            f"| {'' if ratio is None else f'{ratio:.2f} ×'} "
            f"| {spread([o.speed for o in found], 0)} "
            f"| {spread([sum(o.steps) for o in found], 1)} s "
            f"| {(spread(times, 0) + ' s' if times else '–') + missed} "
            f"| {statistics.median(o.evaluations[0][2] for o in found):.1%} → "
            f"{spread([100 * o.final for o in found], 1)} % "
            f"| {spread([o.whole for o in found], 0)} s |"
        )
    return lines


def spread(values: Sequence[float], places: int) -> str:
    """``1.2 (1.0–1.5)``, or the one value alone."""
    shown = f"{statistics.median(values):.{places}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{places}f}–{max(values):.{places}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=list(SIZES), default="quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[PEER, *VARIANTS], default=[PEER, *VARIANTS])
    parser.add_argument("--steps", type=int, help="steps of a run (default: as the size has them)")
    parser.add_argument("--warm-start", type=int, metavar="STEPS", help="another length of the warm start, for a trial")
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/peers.md")
    options, overrides = parser.parse_known_args()
    size = SIZES[options.size]
    steps = options.steps or size.steps
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    known = [] if options.warm_start is None else [f"trainer.warm_start.steps={options.warm_start}"]
    known += [] if not known else [f"trainer.warm_start.optimizer.decay_steps={options.warm_start}"]
    runs = RUNS / (options.size if not known else f"{options.size}-{options.warm_start}")
    trl_python()
    made_with = [override for override in overrides if override.lstrip("~+").startswith(("taskset.", "model."))]
    start = warm_started(size, runs / "start", [*known, *made_with])
    common = shared(size, start, steps, overrides)
    key = hashlib.sha256(json.dumps([common, VARIANTS]).encode()).hexdigest()[:8]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.only}
    for number, name in in_turns(options.only, options.rounds):
        folder = runs / f"{name}-{number}-{key}"

        def make(name: str = name, folder: Path = folder) -> Outcome:
            if name == PEER:
                return run_trl(folder, compose([*common, "run.dir=-"]))
            return run_megarl(folder, last_of_each([*common, *VARIANTS[name], *overrides]))

        outcome = kept(folder.with_suffix(".json"), make)
        outcomes[name].append(outcome)
        print(f"round {number + 1}, {name}: {outcome.step:.2f} s a step, {outcome.final:.1%}", flush=True)
    text = page.Text()
    text.say(f"Size `{options.size}`: {steps} steps, {options.rounds} rounds; median (least–most).")
    text.say("")
    for line in table(outcomes, size.threshold):
        text.say(line)
    if options.write:
        mark = "benchmarks/peers.py" if options.size == "quickstart" else f"benchmarks/peers.py {options.size}"
        page.write("benchmarks/peers.md", str(text), mark)


if __name__ == "__main__":
    main()
