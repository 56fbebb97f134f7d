"""Memory that leaves the device: freed, the same when it is back, and an error that names it when it is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megarl import ops
from megarl.config.schema import Config, TrainerConfig
from megarl.core.errors import NotResident, OffloadError
from megarl.learn.memory import residents as residents_module
from megarl.learn.memory.phases import NEEDS, Phase, PhasePlan, Place
from megarl.learn.memory.residents import Resident, Residents


def tensors() -> list[torch.Tensor]:
    """Two storages, one with two views and a size that is no multiple of a word."""
    whole = torch.arange(5, dtype=torch.float32)
    return [whole[:2], whole[1:], torch.randn(3, 7, dtype=torch.float64)]


@pytest.fixture(params=["megarl", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each value of ``trainer.kernels``: both read every storage for its digest, and must leave it free to go."""
    ops.use(request.param)
    yield request.param
    ops.use("megarl")


@pytest.mark.parametrize("place", [Place.MEMORY, Place.DISK])
def test_away_it_has_no_memory_and_back_the_same_bytes(place: Place, kernels: str, tmp_path: Path) -> None:
    held = tensors()
    before = [t.clone() for t in held]
    resident = Resident("actor", "parameters", lambda: held)
    assert resident.nbytes == 5 * 4 + 21 * 8
    for _ in range(2):
        resident.leave(place, tmp_path)
        assert resident.place is place and resident.nbytes == 5 * 4 + 21 * 8
        assert all(t.untyped_storage().nbytes() == 0 for t in held)
        assert [path.name for path in tmp_path.iterdir()] == (["actor.parameters"] if place is Place.DISK else [])
        resident.come_back()
        assert resident.place is Place.DEVICE and not list(tmp_path.iterdir())
        assert all(torch.equal(t, b) for t, b in zip(held, before, strict=True))
    held[0][1] = 9.0  # views still share their storage
    assert held[1][0] == 9.0


def test_a_kept_copy_is_used_again_while_sizes_stay(kernels: str, tmp_path: Path) -> None:
    held = tensors()
    resident = Resident("actor", "optimizer", lambda: held, keeps_copy=True)
    with mock.patch.object(residents_module, "anonymous_map", wraps=residents_module.anonymous_map) as made:
        for step in range(3):
            held[-1].fill_(step)
            resident.leave(Place.MEMORY, tmp_path)
            resident.come_back()
            assert held[-1].eq(step).all()
        assert made.call_count == 1
        held.append(torch.ones(4))  # the first step of an optimizer makes its moments
        resident.leave(Place.MEMORY, tmp_path)
        resident.come_back()
        assert made.call_count == 2 and held[-1].eq(1).all()
        resident.leave(Place.ABSENT, tmp_path)
        resident.come_back()
        assert not any(t.any() for t in held)


def test_memory_with_huge_pages_has_the_same_bytes(tmp_path: Path) -> None:
    held = [torch.arange(2**20, dtype=torch.float32), torch.arange(2**21, dtype=torch.float64)]  # 4 and 16 MiB
    before = [t.clone() for t in held]
    resident = Resident("actor", "parameters", lambda: held)
    for _ in range(2):
        resident.leave(Place.MEMORY, tmp_path)
        resident.come_back()
    assert all(torch.equal(t, b) for t, b in zip(held, before, strict=True))


def test_absent_it_comes_back_as_zeros(tmp_path: Path) -> None:
    held = tensors()
    resident = Resident("actor", "gradients", lambda: held)
    resident.leave(Place.ABSENT, tmp_path)
    resident.come_back()
    assert not any(t.any() for t in held)


def test_what_was_made_since_leaves_too(tmp_path: Path) -> None:
    """An optimizer has no moments before its first step."""
    held = tensors()
    resident = Resident("actor", "optimizer", lambda: held)
    resident.leave(Place.MEMORY, tmp_path)
    resident.come_back()
    held.append(torch.ones(4))
    resident.leave(Place.MEMORY, tmp_path)
    assert held[-1].untyped_storage().nbytes() == 0
    resident.come_back()
    assert held[-1].eq(1).all()


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (changed, "came back from disk with other bytes than it left with: storage 1 of 2"),
        (lambda path: os.truncate(path, 16), "has 16 bytes, 192 were written"),
        (os.unlink, "critic.optimizer cannot come back from disk"),
    ],
    ids=["a bit", "cut off", "gone"],
)
def test_a_copy_that_was_changed_is_named(fault: object, said: str, tmp_path: Path) -> None:
    held = tensors()
    resident = Resident("critic", "optimizer", lambda: held)
    resident.leave(Place.DISK, tmp_path)
    fault(tmp_path / "critic.optimizer")  # type: ignore[operator]
    with pytest.raises(OffloadError, match=said):
        resident.come_back()
    assert resident.place is Place.DISK


def test_without_room_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    held = tensors()
    before = [t.clone() for t in held]
    resident = Resident("actor", "parameters", lambda: held)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"actor.parameters \(188 bytes\) cannot be moved to disk.*trainer.offload="):
        resident.leave(Place.DISK, tmp_path)
    assert resident.place is Place.DEVICE and not list(tmp_path.iterdir())
    assert all(torch.equal(t, b) for t, b in zip(held, before, strict=True))


def test_a_need_of_what_is_away_is_an_error_with_name_and_place(tmp_path: Path) -> None:
    resident = Resident("reference", "parameters", tensors)
    residents = Residents([resident])
    residents.require("parameters", "optimizer")
    held = tensors()
    resident = Resident("reference", "parameters", lambda: held)
    residents = Residents([resident])
    resident.leave(Place.DISK, tmp_path)
    with pytest.raises(
        NotResident, match=r"reference.parameters \(188 bytes\) is needed on the device, but is on disk"
    ):
        residents.require("parameters")


def test_a_plan_keeps_what_a_phase_needs_and_what_has_no_setting() -> None:
    plan = PhasePlan.of(Config(trainer=TrainerConfig(offload="disk")))
    assert plan.place(Phase.ROLLOUT, "actor.optimizer") is Place.DISK
    assert plan.place(Phase.ROLLOUT, "actor.gradients") is Place.ABSENT
    assert plan.place(Phase.ROLLOUT, "critic.optimizer") is Place.DEVICE
    assert plan.place(Phase.SAVE, "reference.parameters") is Place.DEVICE  # it has no setting
    for phase, needed in NEEDS.items():
        assert {plan.place(phase, name) for name in needed} <= {Place.DEVICE}
    assert plan.place(Phase.SYNC, "actor.parameters") is Place.DEVICE
    assert plan.place(Phase.SYNC, "actor.optimizer") is Place.DISK
    assert plan.place(Phase.START, "actor.gradients") is Place.DEVICE
