"""``megarl convert``: arguments and tools. Torch is imported when a tool runs, not for ``--help``."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.weights.checkpoint.convert.convert import Settings

DESCRIPTION = """Convert between HF checkpoints and Megatron-Core's dist_checkpointing format.

Slices are streamed; memory does not grow with the model. If a command was killed, repeat it: it continues after the
finished files. docs/checkpoints.md has examples."""
DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add description and sub-commands of ``megarl convert``."""
    parser.description = DESCRIPTION
    tools = parser.add_subparsers(dest="tool", required=True, metavar="tool")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return tools.add_parser(name, help=text, description=text)

    to_megatron = add(
        "hf-to-megatron", "Write an HF checkpoint (safetensors, also DeepSeek's FP8) as a Megatron-Core one."
    )
    _paths(to_megatron, "directory of the HF checkpoint", config=False)
    _common(to_megatron)
    _grid(to_megatron)
    to_hf = add(
        "megatron-to-hf",
        "Write the model of a Megatron-Core checkpoint as an HF one; adapters of a run as PEFT's files.",
    )
    _paths(to_hf, "directory that dist_checkpointing wrote, or a training checkpoint (global_step_*)")
    _common(to_hf)
    reshard = add("reshard", "Write the model of a Megatron-Core checkpoint for another grid, padding or dtype.")
    _paths(reshard, "directory that dist_checkpointing wrote, or a training checkpoint (global_step_*)")
    _common(reshard)
    _grid(reshard)
    merge = add(
        "merge-adapter",
        "Write an HF checkpoint with a PEFT adapter in its weights: W + scale B A in float32, rounded once.",
    )
    _adapter(merge, "directory of the HF checkpoint that the adapter is for")
    _common(merge)
    unmerge = add(
        "unmerge-adapter",
        "Write an HF checkpoint without the PEFT adapter that was merged into it, up to the merge's rounding.",
    )
    _adapter(unmerge, "directory of the HF checkpoint with the adapter in its weights")
    unmerge.add_argument(
        "--base",
        type=Path,
        help="the model before the merge: count elements that differ, and restore what modules_to_save replaced",
    )
    _common(unmerge)
    inspect = add("inspect", "List the content of a checkpoint of either format, and missing and unknown tensors.")
    inspect.add_argument("source", type=Path, help="the checkpoint's directory")
    _config(inspect)
    _model(inspect)
    inspect.add_argument(
        "--digests", action="store_true", help="read everything and compute the digest of each logical tensor"
    )
    inspect.add_argument(
        "--dtype", choices=DTYPES, help="cast elements to this dtype before computing digests (default: as stored)"
    )
    inspect.add_argument("--workers", type=int, default=2, help="threads (default %(default)s)")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def _paths(parser: argparse.ArgumentParser, source: str, *, config: bool = True) -> None:
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("target", type=Path, help="directory to make")
    if config:
        _config(parser)


def _adapter(parser: argparse.ArgumentParser, source: str) -> None:
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("adapter", type=Path, help="directory of adapter_config.json and adapter_model.safetensors")
    parser.add_argument("target", type=Path, help="directory to make")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        help="directory of config.json and tokenizer (default: huggingface/ in or beside a Megatron checkpoint)",
    )


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head",
        choices=("auto", "lm", "value"),
        default="auto",
        help="language model or critic/reward model (default: as found)",
    )
    parser.add_argument(
        "--mtp", choices=("keep", "drop"), default="drop", help="multi-token prediction layers (default %(default)s)"
    )


def _common(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the target (default: as stored; FP8 becomes bfloat16)"
    )
    parser.add_argument("--workers", type=int, default=2, help="files written at a time (default %(default)s)")
    parser.add_argument("--file-gib", type=float, default=2.0, help="size of a file (default %(default)s)")
    parser.add_argument(
        "--verify", action="store_true", help="read both sides again and compare digests before the target appears"
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="convert NaN and infinite values, to look at a model that has diverged",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing target if it is empty or a converted checkpoint without other files",
    )


def _grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "grid",
        "Cut chunks and files as these ranks would; every grid can load every cut, its own it loads with the fewest "
        "bytes.",
    )
    for name, text in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        group.add_argument(f"--{name}", type=int, default=1, help=f"{text} parallel size (default %(default)s)")
    group.add_argument("--etp", type=int, help="tensor parallel size of experts (default: tp without ep, else 1)")
    group.add_argument("--first-stage-layers", type=int, help="layers of the first pipeline stage (default: even)")
    group.add_argument("--last-stage-layers", type=int, help="layers of the last pipeline stage (default: even)")
    group.add_argument(
        "--vocab-multiple",
        type=int,
        default=64,
        help="rows of the embedding are a multiple of this times tp (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run one tool; the caller prints errors of megarl.core.errors."""
    from megarl.core.errors import CheckpointError, ConfigError

    for option in ("workers", "file_gib", "vocab_multiple"):
        value = getattr(arguments, option, 1)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')} {value} must be a positive number")
    try:
        return _inspect(arguments) if arguments.tool == "inspect" else _convert(arguments)
    except OSError as error:
        raise CheckpointError(
            f"{error}; files that are finished are kept, repeat the command once the cause is fixed"
        ) from error


def _convert(arguments: argparse.Namespace) -> int:
    from megarl.weights.checkpoint.convert import adapters, convert
    from megarl.weights.checkpoint.convert.adapters import AdapterCheckpoint

    settings = _settings(arguments)
    difference = None
    if arguments.tool == "merge-adapter":
        report = adapters.merge_adapter(arguments.source, arguments.adapter, arguments.target, settings)
    elif arguments.tool == "unmerge-adapter":
        report, difference = adapters.unmerge_adapter(
            arguments.source, arguments.adapter, arguments.target, settings, arguments.base
        )
    elif arguments.tool == "hf-to-megatron":
        report = convert.convert_hf_to_megatron(arguments.source, arguments.target, settings)
    elif arguments.tool == "megatron-to-hf" and (adapter := AdapterCheckpoint.of(arguments.source)) is not None:
        report = adapter.write(arguments.target, settings, arguments.config)
        logging.info(
            "%s has adapters alone, so the target is a PEFT adapter; `megarl convert merge-adapter %s %s TARGET` puts "
            "it into its model",
            adapter.path,
            adapter.base,
            arguments.target,
        )
    elif arguments.tool == "megatron-to-hf":
        report = convert.convert_megatron_to_hf(arguments.source, arguments.target, arguments.config, settings)
    else:
        report = convert.reshard_checkpoint(arguments.source, arguments.target, arguments.config, settings)
    kept = f", {report.kept_files} of them finished before" if report.kept_files else ""
    logging.info(
        "%s: %d tensors, %.2f GB in %d files%s, %.1f s%s",
        report.target,
        report.tensors,
        report.bytes / 1e9,
        report.files,
        kept,
        report.seconds,
        ", digests of both sides equal" if settings.verify else "",
    )
    if difference is not None:
        where = f", by at most {difference.largest:.1e} of the largest of {difference.tensor}"
        logging.info(
            "%d of %d elements differ from %s%s",
            difference.different,
            difference.elements,
            arguments.base,
            where if difference.different else "",
        )
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    import torch

    from megarl.weights.checkpoint.convert.convert import Settings
    from megarl.weights.reshard.layouts import MegatronGrid

    values: dict[str, Any] = {}
    if "tp" in arguments:
        grid = MegatronGrid(
            tp=arguments.tp,
            pp=arguments.pp,
            ep=arguments.ep,
            etp=arguments.etp,
            first_stage_layers=arguments.first_stage_layers,
            last_stage_layers=arguments.last_stage_layers,
        )
        tp, experts = max(grid.tp, 1), max(grid.ep * grid.expert_tp, 1)
        values["grid"] = replace(grid, dp=math.lcm(tp, experts) // tp)  # no more copies than the experts need
        values["vocab_multiple"] = arguments.vocab_multiple
    return Settings(
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        head=arguments.head,
        mtp=arguments.mtp == "keep",
        workers=arguments.workers,
        file_bytes=int(arguments.file_gib * 2**30),
        verify=arguments.verify,
        overwrite=arguments.overwrite,
        allow_nonfinite=arguments.allow_nonfinite,
        **values,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    import torch

    from megarl.weights.checkpoint.convert.verify import inspect_checkpoint, render

    found = inspect_checkpoint(
        arguments.source,
        arguments.config,
        head=arguments.head,
        mtp=arguments.mtp == "keep",
        digests=arguments.digests,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        workers=arguments.workers,
    )
    sys.stdout.write(found.to_json() + "\n" if arguments.json else render(found))
    return 0 if found.is_whole else 1
