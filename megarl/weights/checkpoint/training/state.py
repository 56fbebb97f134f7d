"""Load training state: Megatron's dist_checkpointing for model and optimizer. See ``save.py`` and ``manifest.py``."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import CheckpointError, first_of
from megarl.core.processes.machine import is_out_of_memory
from megarl.weights.checkpoint.training import kept_state, rank_state
from megarl.weights.checkpoint.training.disk_space import on_rank_0
from megarl.weights.checkpoint.training.manifest import (
    LATEST,
    PREFIX,
    finished,
    is_kept,
    latest,
    newest_state,
    prune,
    read_manifest,
    read_state,
    unfounded_latest,
)
from megarl.weights.checkpoint.training.rank_state import copied, differing
from megarl.weights.checkpoint.training.save import (
    CheckpointedModel,
    Manifest,
    Save,
    bare,
    begin,
    has_adapters,
    inner_optimizers,
    named,
    rng_file,
    save,
    sharded_state,
    unwrapped,
)

__all__ = [
    "LATEST",
    "PREFIX",
    "Manifest",
    "CheckpointedModel",
    "Save",
    "begin",
    "finished",
    "inner_optimizers",
    "latest",
    "load",
    "manifest_of",
    "newest",
    "prune",
    "put_random_states",
    "read_manifest",
    "read_state",
    "save",
    "unfounded_latest",
]


def newest(*folders: Path) -> Path | None:
    """Newest state of the first folder that has one, as found by rank 0. Every rank calls it.

    A network file system may list different names on each node.
    """
    return on_rank_0(lambda: next((found for folder in folders if (found := newest_state(folder)) is not None), None))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Run ``read_manifest`` on rank 0; return the result on every rank."""
    return on_rank_0(lambda: read_manifest(checkpoint))


def load(checkpoint: Path, parts: Mapping[str, CheckpointedModel]) -> None:
    """Load models and optimizers on every rank; the saving grids may have been different.

    Raises:
        CheckpointError: the checkpoint is unreadable; a part or tensor is missing or misshapen.
        JobError: as ``KeptState.load``.
    """
    if is_kept(checkpoint):
        kept_state.of_process().load(checkpoint, parts)
        return
    try:
        _load_parts(checkpoint, parts)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{checkpoint} cannot be loaded ({type(error).__name__}: {error}); remove it to resume from the one before "
            "it"
        ) from error


def _load_parts(checkpoint: Path, parts: Mapping[str, CheckpointedModel]) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    for name, part in parts.items():
        if not (checkpoint / name).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {name}: it was made by a run without one; resume with the settings that it was "
                "made with, or take another run.name"
            )
        try:
            with part.grid(), torch.no_grad():
                _load_part(checkpoint / name, part)
        except (CheckpointingException, CheckpointException, KeyError) as error:
            # torch's error is no Exception, and its text contains the tracebacks of all ranks.
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            raise CheckpointError(
                f"{checkpoint / name} does not fit this model: {reason}; was it made by another model.path?"
            ) from error


def _load_part(folder: Path, part: CheckpointedModel) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    loaded = dist_checkpointing.load(sharded_state(part, is_loading=True), str(folder), strategy)
    for name, chunk in named(part.chunks).items():
        bare(chunk).load_state_dict(loaded[name], strict=not has_adapters(chunk))
    if part.optimizer is not None:
        given = copied(loaded["optimizer"])
        part.optimizer.load_state_dict(loaded["optimizer"])
        _check_optimizer(folder, part, given)
        model: Any
        for model in part.chunks:
            # float32 masters may be finer than the saved parameters, on the ranks that own them
            model.start_param_sync(force_sync=True)


def _check_optimizer(folder: Path, part: CheckpointedModel, given: Mapping[Any, Any]) -> None:
    """Raise CheckpointError if an optimizer's masters and moments differ from the checkpoint's."""
    if not (found := differing(part.optimizer, given)):
        return
    names = {p: name for chunk in part.chunks for name, p in unwrapped(chunk).named_parameters()}
    wrong = first_of([f"{state} of {names[parameter]}" for parameter, state in found], 4)
    raise CheckpointError(
        f"the optimizer does not have what {folder} gave it: {wrong}; a run must not go on without its moments"
    )


def put_random_states(checkpoint: Path, parts: Mapping[str, CheckpointedModel]) -> bool:
    """Restore this rank's generators from the checkpoint. Call it after building all models, which draws from them.

    Returns:
        False if a grid differs from the saving one or has no saved states; its generators then keep their seed.
    """
    if is_kept(checkpoint):
        kept_state.of_process().put_random_states(checkpoint, parts)
        return True
    path = checkpoint / rng_file(dist.get_rank())
    if not path.is_file():
        return False
    states: dict[str, Any] = json.loads(path.read_text())
    rank_state.put_process(states["process"])
    same = True
    for name, part in parts.items():
        with part.grid():
            same = name in states["parts"] and rank_state.put_grid(states["parts"][name]) and same
    return same
