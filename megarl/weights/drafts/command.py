"""``megarl add-model DIR``: write the first draft of a table for a new model family."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megarl.core.errors import ArchitectureError, ConfigError

DESCRIPTION = "Draft the table of a model family that has none, from its config.json and transformers' class."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="directory with the family's config.json; weights are not read")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: MODEL_TYPE.py here)")


def run(options: argparse.Namespace) -> int:
    """Write the draft; print tensors that it could not place and the next steps.

    Raises:
        ConfigError: ``--out`` exists or cannot be written, or the directory has no config.json.
        CheckpointError: config.json cannot be read.
        ArchitectureError: The family has a table, or transformers has no class for it.
    """
    from megarl.weights.architectures import ARCHITECTURES  # imports every table
    from megarl.weights.checkpoint.formats.hf_source import read_config_json
    from megarl.weights.drafts.tiny import names_beside, names_in, tiny_config
    from megarl.weights.drafts.writing import drafted, report, source

    folder = Path(options.folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give the directory of a checkpoint, or of its config.json")
    name = str(read_config_json(folder, "DIR").get("model_type"))
    out = Path(options.out or f"{name}.py")
    if name in ARCHITECTURES:
        raise ArchitectureError(f"model_type={name!r} has a table already: megarl/weights/architectures/")
    if out.exists():
        raise ConfigError(f"{out} already exists; remove it, or name another file with --out")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out.parent} is no directory that can be written; name another file with --out")
    config = tiny_config(folder)
    draft, unread = drafted(name, config, names_in(folder))
    beside = list(names_beside(folder, draft.stored))
    out.write_text(source(draft))
    sys.stdout.write("\n".join([f"written: {out}", *report(draft, config, unread, beside), ""]))
    return 0
