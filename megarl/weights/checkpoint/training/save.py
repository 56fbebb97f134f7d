"""Write a checkpoint of models and optimizers, in the foreground or during training.

``begin`` takes a snapshot on every rank; ``Save.finish`` completes it after all ranks have written their files. Between
the two a resuming job sees no new checkpoint.
"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.core.durable import write_text
from megarl.core.errors import CheckpointError, DiskFullError, JobError, first_of
from megarl.core.processes import heartbeat
from megarl.weights.checkpoint.formats.hf_source import HF_FOLDER, copy_small_files
from megarl.weights.checkpoint.training import disk_space as disk
from megarl.weights.checkpoint.training import rank_state, writer
from megarl.weights.checkpoint.training.disk_space import SmallFiles, on_rank_0
from megarl.weights.checkpoint.training.manifest import (
    PREFIX,
    Fingerprint,
    complete,
    fingerprints,
    remove,
    unfinished_name,
)
from megarl.weights.checkpoint.training.rank_state import STATE, spread
from megarl.weights.checkpoint.training.writer import PendingWrite
from megarl.weights.megatron_private import own_writer, put_results_queue
from megarl.weights.reshard.adapters import LORA


@dataclass(frozen=True)
class CheckpointedModel:
    """One model of a checkpoint, with its optimizer if it has one.

    For a model with adapters the checkpoint has only trained tensors; the base model stays at its path.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: Any = None
    grid: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    """Activates the model's process groups."""


@dataclass(frozen=True)
class Manifest:
    """Data of a checkpoint in addition to its tensors."""

    state: Mapping[str, Any]
    """State to resume from, as JSON."""
    attempt: int = 0
    made: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the checkpoint, not needed to resume."""


def rng_file(rank: int) -> str:
    """Name of the file with a rank's generator states."""
    return f"rng_{rank}.json"


class _Request(NamedTuple):
    """Megatron-Core's work for one part: files to write, and steps that follow when all ranks have written."""

    files: list[_File]
    tensors: list[torch.Tensor]
    """Tensors of all files, concatenated."""
    transforms: list[Any]
    results: queue.SimpleQueue[Any]
    finalize: list[Callable[[], None]]


class _File(NamedTuple):
    """File to write, with torch's names, and its contents."""

    path: str
    key: str
    objects: list[Any]
    items: list[Any]
    """torch's record of each tensor."""


class _End(NamedTuple):
    """Fields of a ``_Request`` that ``Save`` keeps; the tensors, as large as a snapshot, are released."""

    wrote: bool
    results: queue.SimpleQueue[Any]
    finalize: list[Callable[[], None]]


class _WriteFailure(NamedTuple):
    """Reason why a rank could not write; empty text if it could."""

    text: str
    full: bool


class _Written(NamedTuple):
    """Result of one rank: Megatron-Core's metadata of each part's files, and their fingerprints."""

    results: list[dict[int, Any]]
    files: dict[str, Fingerprint]


def begin(
    folder: Path,
    step: int,
    parts: Mapping[str, CheckpointedModel],
    manifest: Manifest,
    *,
    model: Path | None = None,
    background: bool = False,
    fence: Callable[[], None] = lambda: None,
    free_space: Callable[[int], None] = lambda needed: None,
) -> Save:
    """Take a snapshot on every rank. ``step`` names the checkpoint; an older one stays until this one is complete.

    Args:
        parts: Folder -> model to store there.
        model: HF directory; its config.json and tokenizer are stored with the first part, to make it convertible.
        background: Write in another process (``writer.of_process``); otherwise write here before returning.
        fence: Called on rank 0 now and before the manifest is written; raises if another attempt has taken over.
        free_space: Called on rank 0 with the bytes that all ranks will write; raises if there is no room.

    Raises:
        OSError, JobError: an error of rank 0, raised on every rank; the partial checkpoint is removed.
    """
    target = folder / unfinished_name(step, manifest.attempt)

    def prepare() -> None:
        fence()
        remove(target)
        for name in parts:
            (target / name).mkdir(parents=True)
        if model is not None:
            (target / HF_FOLDER).mkdir()
            dtype = next(next(iter(parts.values())).chunks[0].parameters()).dtype
            copy_small_files(model, target / HF_FOLDER, dtype, mtp=False)
        disk.reserve(target)
        disk.use_reserve(target, 1)

    def clean_up() -> None:
        if dist.get_rank() == 0:
            remove(target)

    with _undone_by(clean_up):
        on_rank_0(prepare)
    requests, states = [], {"process": rank_state.of_process(), "parts": {}}
    small_files = SmallFiles(target)
    for name, part in parts.items():
        with part.grid(), small_files.written():
            requests.append(_request(target / name, part))
            states["parts"][name] = rank_state.of_grid()
    random_states, rank = json.dumps(states), dist.get_rank()
    needed = torch.tensor(sum(_size(request) for request in requests) + len(random_states))
    dist.all_reduce(needed)

    def check_room() -> None:
        small_files.check()
        free_space(int(needed))

    with _undone_by(clean_up):
        on_rank_0(check_room)
    tensors = [tensor for request in requests for tensor in request.tensors]
    bare_requests = [(request.files, request.transforms) for request in requests]
    work = (target, rng_file(rank), random_states, bare_requests)
    task = writer.of_process().begin(_write, tensors, *work) if background else _Synchronous(_write, tensors, *work)
    ends = [_End(bool(request.files), request.results, request.finalize) for request in requests]
    return Save(folder, step, target, manifest, ends, fence, task, int(needed))


def _write(
    tensors: Sequence[torch.Tensor],
    target: Path,
    rng_name: str,
    random_states: str,
    requests: Sequence[tuple[list[_File], list[Any]]],
) -> _Written:
    """Write a rank's files into ``target``; ``tensors`` are the tensors of all requests, concatenated.

    Raises:
        OSError, RuntimeError: writing failed; the rank's files are removed.
    """
    own = [target / rng_name, *(Path(file.path) for files, _ in requests for file in files)]

    def discard() -> None:
        for path in own:  # at once: other processes that write to this disk need room
            path.unlink(missing_ok=True)

    left = iter(tensors)
    with _undone_by(discard):
        results = [_write_files(files, left, transforms) for files, transforms in requests]
        write_text(own[0], random_states)
        return _Written(results, fingerprints(target, own))


@contextmanager
def _undone_by(action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` if the body fails."""
    try:
        yield
    except (OSError, RuntimeError):
        action()
        raise


class _Synchronous:
    """``writer.PendingWrite`` without a process. It stores errors for ``result``, so that all ranks raise together."""

    done = True

    def __init__(self, work: Callable[..., _Written], *rest: Any) -> None:
        self._error: Exception | None = None
        try:
            self._result = work(*rest)
        except (OSError, RuntimeError) as error:
            self._error = error

    def result(self) -> _Written:
        if self._error is not None:
            raise self._error
        return self._result

    def kill(self) -> None:
        pass


@dataclass
class Save:
    """A checkpoint in progress."""

    folder: Path
    step: int
    _target: Path
    _manifest: Manifest
    _ends: list[_End]
    _fence: Callable[[], None]
    _pending: PendingWrite[_Written] | _Synchronous
    needed: int
    """Bytes written by all ranks, without small files."""

    @property
    def written(self) -> bool:
        """True if this rank has finished or failed to write; ``finish`` then waits only for other ranks."""
        return self._pending.done

    def finish(self, keep: int, best: int | None = None) -> Path:
        """Wait for the writers of all ranks and complete the checkpoint. Then remove finished checkpoints, except the
        newest ``keep`` and that of step ``best`` (rank 0's values count).

        Raises:
            DiskFullError: a rank had no room; raised on every rank, and the partial checkpoint is removed.
            JobError: a rank could not write for another reason, or rank 0's ``fence`` raised it.
            OSError: rank 0 could not write the manifest; raised on every rank.
        """
        mine: _Written | None = None
        fault = _WriteFailure("", False)
        try:
            mine = self._pending.result()
        except (OSError, RuntimeError) as error:
            fault = _WriteFailure(f"rank {dist.get_rank()}: {error}", disk.is_full(error))
        everyone: list[tuple[_WriteFailure, dict[str, Fingerprint]]] = [(fault, {})] * dist.get_world_size()
        dist.all_gather_object(everyone, (fault, {} if mine is None else mine.files))
        if faults := [fault for fault, _ in everyone if fault.text]:
            on_rank_0(lambda: remove(self._target))  # its files may have filled the disk
            failed = f"{self._target} cannot be written ({'; '.join(fault.text for fault in faults)})"
            if all(fault.full for fault in faults):
                raise DiskFullError(f"{failed}; {self._bytes()} make room there")
            raise JobError(failed)
        assert mine is not None
        on_rank_0(lambda: disk.use_reserve(self._target, 2))
        small_files = SmallFiles(self._target)
        with small_files.written():
            for part, results in zip(self._ends, mine.results, strict=True):
                if part.wrote:
                    part.results.put(results)
                for finalize in part.finalize:
                    finalize()
        files = {name: found for _, theirs in everyone for name, found in theirs.items()}

        def end() -> None:
            self._fence()
            state = {"step": self.step, **self._manifest.state}
            with _undone_by(lambda: remove(self._target)):
                small_files.check()
                complete(self._target, state, self._manifest.made, files, keep, best)

        on_rank_0(end)
        return self.folder / f"{PREFIX}{self.step}"

    def _bytes(self) -> str:
        free = shutil.disk_usage(self.folder).free
        return f"{disk.size(self.needed)} were to be written, {disk.size(free)} are free without them;"

    def give_up(self) -> None:
        """Kill this rank's writer; its files are ignored."""
        self._pending.kill()


def save(
    folder: Path,
    step: int,
    parts: Mapping[str, CheckpointedModel],
    state: Mapping[str, Any],
    keep: int,
    model: Path | None = None,
) -> Path:
    """Save in the foreground (``begin``, then ``finish``); return the checkpoint."""
    return begin(folder, step, parts, Manifest(state), model=model).finish(keep)


def _request(folder: Path, part: CheckpointedModel) -> _Request:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    if part.optimizer is not None:
        start_moments(part.optimizer)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()  # for one process: ``Save.finish`` fills it
    put_results_queue(results)
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        True,
    )
    found = dist_checkpointing.save(
        sharded_state(part, is_loading=False), str(folder), strategy, async_sharded_save=True, **own_writer()
    )
    assert found is not None, "an asynchronous save returns what is to be done"
    if found.async_fn is None:
        return _Request([], [], [], results, found.finalize_fns)
    # Megatron would distribute this function's work over many processes; here one process does all of it.
    transforms, _ = found.async_fn.args
    buckets = found.preload_fn()
    files = [_File(path, key, objects, [item for item, _ in pairs]) for path, key, (objects, pairs) in buckets]
    tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
    return _Request(files, tensors, transforms, results, found.finalize_fns)


def _size(request: _Request) -> int:
    """Bytes of the request's tensors and objects."""
    objects = sum(len(data.getbuffer()) for file in request.files for _, data in file.objects)
    return objects + sum(tensor.nbytes for tensor in request.tensors)


def _write_files(files: Sequence[_File], tensors: Iterator[torch.Tensor], transforms: list[Any]) -> dict[int, Any]:
    """Write each file with the next of ``tensors``; file number -> torch's record. Raises OSError or RuntimeError."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    found: dict[int, Any] = {}
    for number, file in enumerate(files):
        heartbeat.beat()
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        counted: queue.Queue[int] = queue.Queue()
        counted.put(number)
        bucket = file.path, file.key, (file.objects, [(item, next(tensors)) for item in file.items])
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=number,
            write_bucket=bucket,
            results_queue=results,
            count_queue=counted,
            use_fsync=True,
        )
        _, outcome = results.get()
        if isinstance(outcome, Exception):
            raise disk.cause(outcome) or RuntimeError(f"{file.path}: {type(outcome).__name__}: {outcome}")
        found[number] = outcome
    return found


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's, one for each group of buffers; empty if the rank trains nothing."""
    return [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer]) if o.optimizer is not None]


def start_moments(optimizer: Any) -> None:
    """Create zero moments, because an optimizer has none to save before its first step."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group.setdefault("step", 0)
            for p in group["params"]:
                if "exp_avg" not in inner.state[p]:
                    dtype = getattr(inner, "exp_avg_dtype", p.dtype)  # of TransformerEngine's Adam and of ours
                    inner.state[p].update({name: torch.zeros_like(p, dtype=dtype) for name in STATE[1:]})


def bare(chunk: Any) -> Any:
    """Remove the DDP wrapper."""
    from megatron.core.distributed import DistributedDataParallel

    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def named(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return a stage's chunks by Megatron's names. Saved tensors are named by layer, not by chunk, so a grid with
    another number of chunks can load them."""
    return {"model" if len(chunks) == 1 else f"model{i}": chunk for i, chunk in enumerate(chunks)}


def has_adapters(chunk: Any) -> bool:
    """True if a chunk is trained through adapters."""
    return hasattr(unwrapped(chunk), LORA)


def unwrapped(chunk: Any) -> Any:
    """Return megarl's GPTModel in a chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _kept(chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a chunk's state to save. Raises CheckpointError if a trained parameter is missing."""
    if not has_adapters(chunk):
        return state
    trained = {name for name, parameter in unwrapped(chunk).named_parameters() if parameter.requires_grad}
    if left := sorted(trained - state.keys()):
        raise CheckpointError(
            f"a checkpoint would have nothing for {first_of(left, 4)}, which model.lora trains: adapters are saved and "
            "restored whole"
        )
    return {name: entry for name, entry in state.items() if name in trained}


def sharded_state(part: CheckpointedModel, *, is_loading: bool) -> dict[str, Any]:
    """State dict for dist_checkpointing to save or load a part; call it with the part's grid active."""
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        name: _kept(chunk, bare(chunk).sharded_state_dict(metadata=metadata))
        for name, chunk in named(part.chunks).items()
    }
    if part.optimizer is not None:
        spread(part.optimizer)
        state["optimizer"] = part.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state
