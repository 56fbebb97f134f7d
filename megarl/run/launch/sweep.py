"""Sweeps: one job per combination of swept settings, in hydra's syntax (``a=1,2``, ``range``, ``choice``, ``glob``).

A combination's number is its index in hydra's order (the last sweep varies fastest), so that the tasks of a Slurm array
agree on it. The table of results is made from the runs' files.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from megarl.config import Config, compose
from megarl.config.load import config_dirs, hydra_at
from megarl.config.overrides import grammar_fault
from megarl.core.errors import ConfigError, InputError, JobError
from megarl.core.metrics import records

log = logging.getLogger(__name__)

LONGEST = 150
"""Maximum characters of a directory's name."""
STOPPED = 130


class Combination(NamedTuple):
    number: int
    slug: str
    """Swept values, ``algorithm=grpo,trainer.optimizer.lr=1e-5``; name of the combination's directory in
    ``run.dir``."""
    config: Config


def combinations(overrides: Sequence[str], index: int | None = None, own: str | None = None) -> list[Combination]:
    """Return the composed settings of every combination, or only of number ``index``, each with a separate directory.
    ``own``: see :func:`megarl.config.compose`.

    Raises:
        ConfigError: names the combination with invalid settings; or nothing is swept, the order is not fixed, or no
            combination has this number.
    """
    found: list[Combination] = []
    for number, (words, swept) in enumerate(expanded := expand(overrides, own)):
        if index is not None and number != index:
            continue
        slug = folder_name(swept)
        try:
            where = compose(words, own=own).run.dir
            others = [word for word in words if word.partition("=")[0].lstrip("+") != "run.dir"]
            config = compose([*others, f"run.dir={quoted(f'{where}/{slug}')}"], own=own)
        except ConfigError as error:
            raise ConfigError(f"combination {number}, {' '.join(swept)}: {error}") from error
        found.append(Combination(number, slug, config))
    if not found:
        raise ConfigError(f"--index {index}: the combinations are 0 to {len(expanded) - 1}")
    folders = [combination.config.run.dir for combination in found]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ConfigError(f"two combinations would both run in {twice[0]}; give each value once")
    return found


def expand(overrides: Sequence[str], own: str | None = None) -> list[tuple[list[str], list[str]]]:
    """Return (all overrides, the swept ones) of each combination; unswept overrides keep their text. Raises
    ConfigError."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    choices: list[list[str]] = []
    swept: list[int] = []
    with hydra_at(config_dirs(own)):
        parser = OverridesParser.create(
            config_loader=GlobalHydra.instance().config_loader()
        )  # it finds the values that a glob matches
        try:
            for number, (text, override) in enumerate(
                zip(overrides, parser.parse_overrides(list(overrides)), strict=True)
            ):
                if not override.is_sweep_override():
                    choices.append([text])
                    continue
                if not override.is_discrete_sweep():
                    raise ConfigError(
                        f"{text}: an interval has no list of values; give values, or range(start,stop,step)"
                    )
                if getattr(override.value(), "shuffle", False):
                    raise ConfigError(f"{text}: a shuffled sweep has another order in each process; leave shuffle out")
                values = list(override.sweep_string_iterator())
                if not values:
                    raise ConfigError(f"{text}: matches nothing")
                choices.append([f"{override.get_key_element()}={value}" for value in values])
                swept.append(number)
        except HydraException as error:
            raise ConfigError(f"the sweep could not be read: {grammar_fault(overrides) or error}") from error
    if not swept:
        raise ConfigError(
            "-m without anything to sweep; give a setting several values (trainer.optimizer.lr=1e-5,3e-5), or leave -m "
            "out"
        )
    return [(list(words), [words[number] for number in swept]) for words in itertools.product(*choices)]


def folder_name(swept: Sequence[str]) -> str:
    """Return the name of a combination's folder, made from its overrides; a long name ends in a digest."""
    name = re.sub(r"[^\w.,=+-]", "_", ",".join(word.lstrip("+") for word in swept), flags=re.ASCII)
    if len(name) > LONGEST:  # a file system's limit is 255
        name = f"{name[:LONGEST]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return name or "_"


def quoted(text: str) -> str:
    """Quote a value for hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def run_sweep(overrides: Sequence[str], index: int | None, *, check_only: bool, own: str | None = None) -> int:
    """Run the unfinished combinations, one after another, or only number ``index``.

    Without ``index`` all are checked like ``megarl train --check`` before the first starts.

    Returns:
        0 if all are finished, 1 if one failed (the others still run), 130 after a stop; with ``index`` the status of
        ``megarl train``.

    Raises:
        ConfigError: a combination is invalid, or no combination has this number. With ``index`` also the errors of its
            run.
    """
    found = combinations(overrides, index, own)
    from megarl.run.checks.job import check
    from megarl.run.launch.job import run
    from megarl.run.run_dir.prepare import no_bytecode

    if index is not None and not check_only:
        log.info("combination %d: %s, in %s", index, found[0].slug, found[0].config.run.dir)
        return run(found[0].config)
    with no_bytecode() if check_only else nullcontext():
        for number, slug, config in found:
            try:
                check(config, dry=check_only)
            except InputError as error:
                raise ConfigError(f"combination {number}, {slug}: {error}") from error
            log.info("combination %d fits: %s, in %s", number, slug, config.run.dir)
    if check_only:
        return 0
    return _run_all(found)


def _run_all(found: Sequence[Combination]) -> int:
    from megarl.run.launch.job import run
    from megarl.run.run_dir.resume import is_finished

    results: list[str] = []
    status = 0
    for number, slug, config in found:
        if is_finished(config, Path(config.run.dir)):
            results.append("finished before, skipped")
            continue
        log.info("combination %d of %d: %s, in %s", number, len(found), slug, config.run.dir)
        try:
            code = run(config)
        except (JobError, InputError, OSError) as error:
            log.error("%s", error)
            code = 1
        results.append({0: "finished", STOPPED: "stopped"}.get(code, "failed") + f" (status {code})")
        if code == STOPPED:
            status = STOPPED
            break
        status = max(status, code)
    for number, slug, _ in found:
        log.info("%d %s: %s", number, slug, results[number] if number < len(results) else "not started")
    if begun := [run_dir for _, _, config in found if (run_dir := Path(config.run.dir)).is_dir()]:
        log.info("\n%s", table_of(begun))
    return status


HELD_OUT = ("val/accuracy", "val/loss")
"""Metrics that runs are compared by: the first one that a run has."""


def runs_of(folder: Path) -> list[Path]:
    """Return the directories of the runs in a sweep's directory, by name."""
    return sorted(path.parent for path in folder.glob("*/resolved.json"))


def table_of(runs: Sequence[Path]) -> str:
    """Return a line per run: name, steps, held-out metric before and after. Raises ConfigError for no runs."""
    if not runs:
        raise ConfigError("no run has begun in this sweep")
    rows = [("run", "steps", "held out", "first", "last"), *map(_row, runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _row(run: Path) -> tuple[str, str, str, str, str]:
    found = list(records(run / "metrics.jsonl"))
    trained = [record["step"] for record in found if any(name.startswith(("actor/", "train/")) for name in record)]
    steps = f"{max(trained, default=0):.0f}"
    for name in HELD_OUT:
        if values := [record[name] for record in found if name in record]:
            form = "{:.1%}" if name == "val/accuracy" else "{:.4f}"
            return run.name, steps, name.removeprefix("val/"), form.format(values[0]), form.format(values[-1])
    return run.name, steps, "—", "—", "—"
