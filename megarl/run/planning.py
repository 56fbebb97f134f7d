"""``megarl plan``: the fastest grids, placements and engines for a number of GPUs, as the cost model predicts them."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config, compose, hub
from megarl.config.load import load_resolved
from megarl.core.errors import ConfigError
from megarl.core.metrics import records
from megarl.learn.parallel.grid import megatron_grid
from megarl.planner.model_cost import DEVICES
from megarl.planner.phase_seconds import Lengths
from megarl.planner.predict import JobPlan, Prediction, StepWork, predict
from megarl.planner.search import TIE, reason, search, ties
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.reshard.grid import check_grid

OWN = "experiment=own_gpu"
"""Experiment of a command line that names none."""
PHASES = ("rollout", "inference", "update", "sync", "moves")


def run(arguments: argparse.Namespace) -> int:
    """Print the plans.

    Raises:
        ConfigError: a number, ``--lengths`` or the settings are wrong, or nothing fits the GPUs.
    """
    for name in ("nodes", "gpus_per_node", "top"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(arguments, name)}; set it to 1 or more")
    config, lengths = _settings(arguments)
    if config.model.path is None:
        raise ConfigError("megarl plan needs model.path, a directory with the config.json of an HF checkpoint")
    path = Path(config.model.path)
    if not path.exists() and (advice := hub.advice("model.path", config.model.path)):
        raise ConfigError(f"model.path={path} has no config.json; {advice}")
    hf_config = read_hf_config(path)
    sys.stdout.write(report(config, hf_config, arguments, lengths))
    return 0


def report(
    config: Config, hf_config: dict[str, Any], arguments: argparse.Namespace, lengths: Lengths | None = None
) -> str:
    """Return the text that ``megarl plan`` prints. Raises ConfigError if no plan fits."""
    device, gpus = DEVICES[arguments.gpu], arguments.nodes * arguments.gpus_per_node
    work = StepWork.of(config, hf_config, lengths)
    found = search(work, gpus, device, str(hf_config["model_type"]), config.sync.max_staleness, arguments.gpus_per_node)
    if not found:
        raise ConfigError(
            f"no grid of {gpus} {arguments.gpu} GPUs holds {work.model.parameters / 1e9:.1f} B parameters with "
            f"trainer.max_tokens_per_micro_batch={work.micro_batch}; give more --nodes or "
            "--gpus-per-node, a --gpu with more memory, or lower it"
        )
    own, refusal = predict(work, JobPlan.of(config), device), _refusal(config, work, str(hf_config["model_type"]))
    best = found[0]
    lines = [
        f"model    {work.model.parameters / 1e9:.3g} B parameters, {hf_config['model_type']}",
        f"GPUs     {arguments.nodes} x {arguments.gpus_per_node} {arguments.gpu}",
        f"work     {_work(work, lengths is None)}",
        "",
        f"{'':>3}{'step':>9}" + "".join(f"{phase:>11}" for phase in PHASES) + f"{'idle':>6}{'tok/s/GPU':>11}  plan",
    ]
    shown = found[: arguments.top]
    lines += [_row(str(number), one) for number, one in enumerate(shown, 1)]
    if own.gpus <= gpus and refusal is None:
        lines.append(_row("set", own))
    lines.append("")
    alike = len(ties(found))
    if alike > 1:
        lines.append(f"The first {alike} plans are within 15 % of each other: a tie, which the model cannot decide.")
    lines += [f"{number} is slower than 1: {reason(best, one)}" for number, one in enumerate(shown[1:], 2)]
    if refusal is not None:
        lines.append(f"The settings as they are would be refused: {refusal}")
    elif own.gpus > gpus:
        lines.append(f"The settings as they are need {own.gpus} GPUs.")
    elif own.step_s > best.step_s * (1 + TIE):
        why = reason(best, own) if own.gpus == gpus else f"they use {own.gpus} of {gpus} GPUs"
        lines.append(f"The settings as they are take {own.step_s / best.step_s:.2f} x as long: {why}")
    lines += [f"WARNING {number}: {text}" for number, one in enumerate(shown, 1) for text in one.warnings]
    memory = ", ".join(f"{phase} {bytes_ / 1e9:.0f} GB" for phase, bytes_ in best.memory.items())
    lines.append(f"Memory of plan 1 on its fullest GPU: {memory}, of {device.memory_bytes / 1e9:.0f} GB.")
    words = list(arguments.overrides)
    if not any(word.startswith("experiment=") for word in words) and arguments.run_dir is None:
        words.insert(0, OWN)
    if arguments.nodes > 1 and config.store.url.startswith("sqlite"):
        words.append("store=postgres")
    chosen = [word for word in best.plan.overrides(bool(work.model.experts)) if not _is_set(config, word)]
    replaced = {word.partition("=")[0] for word in chosen}
    words = [word for word in words if word.partition("=")[0].lstrip("+") not in replaced] + chosen
    if arguments.config_dir is not None:
        words = ["--config-dir", str(arguments.config_dir), *words]
    if arguments.run_dir is not None:
        lines += ["", f"To the command that made {arguments.run_dir} add:"]
    lines += ["", _wrapped("megarl train" if arguments.run_dir is None else "   ", words), ""]
    return "\n".join(lines)


def _settings(arguments: argparse.Namespace) -> tuple[Config, Lengths | None]:
    lengths = _quantiles(arguments.lengths) if arguments.lengths else None
    if arguments.run_dir is None:
        words: Sequence[str] = arguments.overrides
        if not any(word.startswith("experiment=") for word in words):
            given = {word.partition("=")[0] for word in words}
            rows = [f"taskset.{split}=rows" for split in ("train", "eval") if f"taskset.{split}" not in given]
            words = [OWN, *rows, *words]
        return compose(words, own=arguments.config_dir), lengths
    folder = Path(arguments.run_dir)
    if not (folder / "resolved.json").is_file():
        raise ConfigError(f"--from {folder} has no resolved.json; give the directory of a run")
    return load_resolved(folder / "resolved.json"), lengths or _recorded(folder)


def _quantiles(text: str) -> Lengths:
    parts = text.split(",")
    try:
        p50, p99, most = (float(part) for part in parts)
    except ValueError:
        p50 = p99 = most = math.nan
    if not 0 < p50 <= p99 <= most < math.inf:
        raise ConfigError(f"--lengths={text} is not P50,P99,MAX in tokens, each at least the one before: 900,4000,8192")
    return Lengths.of_quantiles(p50, p99, int(most))


def _recorded(folder: Path) -> Lengths | None:
    """Return the lengths of a run's latest steps; None if it has no step."""
    steps = [record for record in records(folder / "metrics.jsonl") if "response_length/mean" in record][-20:]
    means, most = ([step[f"response_length/{name}"] for step in steps] for name in ("mean", "max"))
    if not means:
        return None
    return Lengths.of_mean(sum(means) / len(means), max(1, math.ceil(max(most))))


def _refusal(config: Config, work: StepWork, name: str) -> ConfigError | None:
    """Return the error with which the model refuses the grid of the settings; None if the grid fits."""
    try:
        check_grid(name, work.sizes, megatron_grid(config.parallel))
    except ConfigError as error:
        return error
    return None


def _work(work: StepWork, guessed: bool) -> str:
    lengths = f"mean {work.lengths.mean:,.0f} of at most {work.lengths.cap:,} tokens"
    text = f"{work.trajectories:,} trajectories in groups of {work.group}, responses {lengths}"
    if not work.samples:
        return f"{work.trajectories:,} rows, {work.tokens:,.0f} tokens, {work.updates} update a step"
    return text + (" (a guess: give --lengths or --from)" if guessed else "")


def _wrapped(command: str, words: Sequence[str]) -> str:
    """Return a command for a shell, broken between words into lines of about 100 characters."""
    lines = [command]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > 100:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def _is_set(config: Config, override: str) -> bool:
    """True if the settings have the value of an override already."""
    name, _, text = override.partition("=")
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, list):
        return f"[{','.join(value)}]" == text
    return ("null" if value is None else str(value).lower()) == text


def _row(name: str, one: Prediction) -> str:
    phases = "".join(f"{one.seconds.get(phase, 0.0):>10.1f}s" for phase in PHASES)
    return f"{name:>3}{one.step_s:>8.1f}s{phases}{one.idle:>6.0%}{one.rate:>11,.0f}  {one.plan}"
