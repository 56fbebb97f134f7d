"""Faults of a resume with adapters: each is refused, and the error names what is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.config.schema import ParallelConfig
from megarl.core.errors import CheckpointError
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.peft_twin import save_adapter
from tests.parallel.test_lora import LORA, make_actor
from tests.parallel.test_megatron_on_cpu import parts, sft_steps

STEPS = 2


def _without(letter: str) -> AbstractContextManager[Any]:
    """Adapters do not know of their A's (or B's)."""
    from megarl.learn.models.lora import Adapters

    whole = Adapters.sharded_state_dict

    def fewer(self: Adapters, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: t for name, t in whole(self, prefix, *args, **kwargs).items() if not name.endswith(f".{letter}")}

    return mock.patch.object(Adapters, "sharded_state_dict", fewer)


def _optimizer(change: Callable[[Any, Callable[[], None]], None]) -> AbstractContextManager[Any]:
    """The optimizer takes its state otherwise."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    whole = DistributedOptimizer.load_state_dict

    def load(self: Any, state: Any) -> None:
        change(self, lambda: whole(self, state))

    return mock.patch.object(DistributedOptimizer, "load_state_dict", load)


def _lose(name: str) -> Callable[[Any, Callable[[], None]], None]:
    """One state of every parameter is zero after the load."""

    def change(optimizer: Any, load: Callable[[], None]) -> None:
        load()
        for state in optimizer.optimizer.state.values():
            state[name].zero_()

    return change


def faults() -> dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str]]:
    """Name -> (checkpoint, fault of the load, words of the error)."""
    return {
        "nothing": ("whole", nullcontext, ""),
        "a checkpoint without an optimizer": ("bare", nullcontext, "optimizer.state"),
        "A not restored": ("whole", lambda: _without("a"), r".a, "),
        "B not restored": ("whole", lambda: _without("b"), r".b, "),
        "the optimizer not restored": ("whole", lambda: _optimizer(lambda self, load: None), "exp_avg"),
        "first moments lost": ("whole", lambda: _optimizer(_lose("exp_avg")), "exp_avg of lora."),
        "second moments lost": ("whole", lambda: _optimizer(_lose("exp_avg_sq")), "exp_avg_sq of lora."),
    }


def resumes(rank: int, model: str, folder: str) -> tuple[dict[str, str], list[str]]:
    """Runs in each rank: the error of a load with each fault, and digests of bases that differ in one number."""
    from megarl.weights.checkpoint.training import state
    from megarl.weights.checkpoint.training.state import CheckpointedModel

    actor = make_actor(Path(model), ParallelConfig(tp=2))
    sft_steps(actor, range(STEPS))
    whole, bare = parts(actor), {"actor": CheckpointedModel(actor.model.chunks, None)}

    def saved_as(name: str, given: Any) -> Path:
        return state.save(Path(folder) / name, STEPS, given, {"phase": "rl"}, keep=1)

    saved = {"whole": saved_as("whole", whole), "bare": saved_as("bare", bare)}
    found = {}
    try:
        with _without("a"):
            saved_as("without a", bare)
    except CheckpointError as error:
        found["A not saved"] = str(error)
    for name, (which, fault, _) in faults().items():
        sft_steps(actor, range(1))  # so that it has neither the weights nor the moments of the checkpoint
        try:
            with fault():
                state.load(saved[which], whole)
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error).replace("\n", " ")[:600]
    digests = [str(actor.model.adapters.base_digest(actor.model.tensors))]
    if rank == 0:
        actor.model.tensors["decoder.layers.0.mlp.linear_fc2.weight"].view(-1)[5] += 1e-6
    return found, [*digests, str(actor.model.adapters.base_digest(actor.model.tensors))]


def test_faulty_resumes_are_refused(tmp_path: Path) -> None:
    path = save_tiny_qwen3(tmp_path / "model")
    save_adapter(path, LORA)
    for found, (before, after) in run_grid(2, resumes, str(path), str(tmp_path)):
        for name, (_, _, words) in faults().items():
            assert (words in found[name]) if words else not found[name], (name, found[name])
        assert ".a, " in found["A not saved"]
        assert before != after, "one number of the base, on one rank"
