"""Allocations that fail, real ones: recognised, explained, and answered with a smaller micro-batch or an error."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema import Config, ModelConfig, RolloutConfig, TrainerConfig
from megarl.core.errors import ConfigError, JobError, MemoryFullError, NonRetryableError
from megarl.core.processes.machine import bytes_asked, is_out_of_memory
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase, Place
from megarl.learn.memory.residents import Resident, Residents
from megarl.run.checks.roles import check_budget
from megarl.run.launch.job import MicroBatchBudget, halved
from megarl.run.run_dir.changes import Change
from megarl.train.memory import memory_explained

HUGE = 1 << 50
FAILING: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(HUGE),
    "storage": lambda: torch.empty(0, dtype=torch.uint8).untyped_storage().resize_(HUGE),
    "backward": lambda: torch.ones(1, requires_grad=True).expand(HUGE).exp().sum().backward(),
    "numpy": lambda: np.empty(HUGE),
    "python": lambda: bytearray(HUGE),
    "mmap": lambda: mmap.mmap(-1, HUGE),
}


def raised(do: Callable[[], object]) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as found:
        do()
    return found.value


@pytest.mark.parametrize("what", FAILING)
def test_an_allocation_that_fails_is_recognised(what: str) -> None:
    error = raised(FAILING[what])
    assert is_out_of_memory(error)
    try:
        raise ValueError("in a user's function") from error
    except ValueError as wrapped:
        assert is_out_of_memory(wrapped) and bytes_asked(wrapped) == bytes_asked(error)


@pytest.mark.parametrize(
    "error",
    [
        # texts of torch 2 for CUDA
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_those_of_a_gpu_are_too(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("Connection closed by peer"), ValueError("out of memory"), FileNotFoundError(2, "no file")]
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_bytes_that_were_asked_for() -> None:
    assert bytes_asked(raised(FAILING["torch"])) == f"{4 * HUGE} bytes"
    assert bytes_asked(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")) == "2.00 GiB"
    assert bytes_asked(raised(FAILING["python"])) is None


def explained(phase: Phase, do: Callable[[], object]) -> None:
    held = [torch.zeros(8), torch.zeros(5)]
    there = Residents(
        Resident("actor", kind, lambda i=i: held[i : i + 1])  # type: ignore[misc]
        for i, kind in enumerate(("parameters", "gradients"))
    )
    away = Resident("reference", "parameters", lambda: held)
    away.place = Place.MEMORY
    models: Any = SimpleNamespace(actor=None)
    models.by_role = lambda: {
        "actor": SimpleNamespace(residents=there),
        "reference": SimpleNamespace(residents=Residents([away])),
    }
    turns: Any = SimpleNamespace(phase=phase)
    with memory_explained(turns, models):
        do()


def test_the_error_has_phase_bytes_and_residents() -> None:
    with pytest.raises(MemoryFullError) as found:
        explained(Phase.UPDATE, FAILING["torch"])
    assert str(found.value).startswith(
        f"out of memory in phase update, {4 * HUGE} bytes were asked for; on the device: actor.parameters 32 bytes, "
        "actor.gradients 20 bytes; memory: reference.parameters 52 bytes; RuntimeError: "
    )


def test_where_smaller_micro_batches_do_not_help_it_is_a_failure_like_others() -> None:
    with pytest.raises(JobError, match="out of memory in phase save") as found:
        explained(Phase.SAVE, FAILING["numpy"])
    assert not isinstance(found.value, MemoryFullError)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), JobError("DefaultCPUAllocator: can't allocate memory")])
def test_other_failures_pass_as_they_are(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        explained(Phase.UPDATE, fail)
    assert found.value is error


def config_of(**trainer: Any) -> Config:
    return Config(
        model=ModelConfig(path="unused"),
        rollout=RolloutConfig(max_prompt_tokens=300, max_response_tokens=200),
        trainer=TrainerConfig(**trainer),
    )


def fits(config: Config) -> None:
    check_budget(config, algorithms.get("grpo"))


@pytest.mark.parametrize(
    ("trainer", "change"),
    [
        ({"max_tokens_per_micro_batch": 1001}, Change("trainer.max_tokens_per_micro_batch", 1001, 500)),
        ({"packing": False, "micro_batch_size": 3}, Change("trainer.micro_batch_size", 3, 1)),
    ],
)
def test_half_the_budget_is_the_one_change(trainer: dict[str, Any], change: Change) -> None:
    config = config_of(**trainer)
    smaller, found = halved(config, fits)
    assert found == change
    name = change.setting.removeprefix("trainer.")
    assert smaller == replace(config, trainer=replace(config.trainer, **{name: change.new}))


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({"max_tokens_per_micro_batch": 999}, r"max_tokens_per_micro_batch=499 does not hold one sequence .* 500"),
        ({"packing": False, "micro_batch_size": 1}, "trainer.micro_batch_size is 1 already"),
    ],
)
def test_no_half_is_an_error_that_names_what_to_change(trainer: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        halved(config_of(**trainer), fits)
    with pytest.raises(NonRetryableError, match=reason) as found:
        MicroBatchBudget(fits).halve(config_of(**trainer), MemoryFullError("trainer rank 1 ended with status 5"))
    for word in ("rank 1 ended", "rollout.max_response_tokens", "critic.offload", "model.recompute", "parallel.tp"):
        assert word in str(found.value)


def test_it_is_halved_once(caplog: pytest.LogCaptureFixture) -> None:
    budget, config = MicroBatchBudget(fits), config_of(max_tokens_per_micro_batch=8000)
    config = budget.halve(config, MemoryFullError("trainer rank 1 ended with status 5"))
    assert config.trainer.max_tokens_per_micro_batch == 4000
    assert "trainer.max_tokens_per_micro_batch 8000 -> 4000" in caplog.text and "order of summation" in caplog.text
    with pytest.raises(NonRetryableError, match="again, with trainer.max_tokens_per_micro_batch 8000 -> 4000; lower"):
        budget.halve(config, MemoryFullError("trainer rank 0 ended with status 5"))
