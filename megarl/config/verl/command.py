"""``megarl config import-verl``: verl's scripts, command lines and YAML files as an experiment of megarl."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.verl.imported import ImportedKeys

NAME = "import-verl"
log = logging.getLogger(__name__)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after ``megarl config import-verl``; those after ``--`` are verl's. Exits with status 2 if a
    word is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"megarl config {NAME}",
        description="Turn a configuration of verl's into an experiment of megarl: print it, and what became of every "
        "key. Nothing of the script is run. See docs/from_verl.md.",
    )
    parser.add_argument("file", nargs="?", help="shell script of verl.trainer.main_ppo, or YAML file")
    parser.add_argument(
        "given",
        nargs="*",
        metavar="NAME=value",
        help="variables of the script, and further settings of verl's; after -- a whole command line without FILE",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="rows of data.train_files, for lengths in epochs")
    parser.add_argument("--write", metavar="DIR/experiment/NAME.yaml", help="write the experiment there")
    cut = list(words).index("--") if "--" in words else len(words)
    arguments = parser.parse_intermixed_args(list(words)[:cut])
    if arguments.file is not None and "=" in arguments.file and not os.path.exists(arguments.file):
        arguments.given, arguments.file = [arguments.file, *arguments.given], None
    arguments.given += list(words)[cut + 1 :]
    if arguments.file is None and not arguments.given:
        parser.error("give a script, a YAML file, or verl's command line after --")
    if arguments.rows is not None and arguments.rows < 1:
        parser.error(f"--rows {arguments.rows}: give the number of rows, at least 1")
    arguments.command, arguments.import_verl = "config", True
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Print or write the experiment; log what became of every key. Raises ConfigError for unusable input."""
    from megarl.config.verl.imported import check_experiment_file, convert, experiment
    from megarl.config.verl.verl_source import read_source
    from megarl.core.durable import write_text
    from megarl.core.errors import ConfigError

    source = read_source(arguments.file, arguments.given, os.environ, arguments.rows)
    if not source.values:
        raise ConfigError("no setting of verl's was found; give a script, a YAML file, or its command line after --")
    found = convert(source)
    text = experiment(found, f"Imported from verl: {arguments.file or 'a command line'}.")
    check_experiment_file(text, found)
    _report(found, source.notes)
    if arguments.write is None:
        sys.stdout.write(text)
        log.info("save it as DIR/experiment/NAME.yaml, then: megarl train --config-dir DIR experiment=NAME")
        return 0
    path = Path(arguments.write)
    if path.parent.name != "experiment" or path.suffix != ".yaml":
        raise ConfigError(
            f"--write {path}: experiments are files of a folder experiment; give DIR/experiment/NAME.yaml"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    sys.stdout.write(f"megarl train --config-dir {path.parents[1]} experiment={path.stem}\n")
    return 0


def _report(found: ImportedKeys, notes: Sequence[str]) -> None:
    for key, settings in found.mapped.items():
        log.info("%s -> %s", key, ", ".join(f"{name}={value}" for name, value in settings.items()) or "the same here")
    for key, reason in found.no_effect.items():
        log.info("%s has no effect: %s", key, reason)
    for note in notes:
        log.info("note: %s", note)
    for key, todo in found.unmapped.items():
        log.info("NOT IMPORTED %s: %s", key, todo)
    log.info(
        "%d keys mapped, %d without effect, %d not imported",
        len(found.mapped),
        len(found.no_effect),
        len(found.unmapped),
    )
