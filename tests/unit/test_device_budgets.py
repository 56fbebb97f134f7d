"""Budgets of devices, hosts and disks: what does not fit is refused before a start, with what would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase
from megarl.run.checks.memory import check_devices, ledger_of
from tests.unit.small_job import config_of
from tests.unit.test_memory_checks import TINY

AWAY = ("trainer.offload=memory", "reference.offload=memory")
COLOCATED = "rollout.placement=colocated"


def ledger(*overrides: str) -> Any:
    config = config_of(Path("x"), *overrides)
    return ledger_of(config, algorithms.get(config.algorithm.name), TINY)


def checked(config: Config, nodes: int = 1) -> None:
    check_devices(config, algorithms.get(config.algorithm.name), TINY, nodes)


def budget(size: int, *overrides: str, **settings: int | None) -> Config:
    config = config_of(Path("x"), *overrides)
    return replace(config, cluster=replace(config.cluster, device_bytes=size, **settings))


def test_one_resident_too_many_is_refused_with_the_nearest_plan() -> None:
    least = ledger(COLOCATED, *AWAY).largest().total
    checked(budget(least, COLOCATED, *AWAY))
    with pytest.raises(ConfigError) as refused:
        checked(budget(least, COLOCATED))
    said = str(refused.value)
    assert "engine.kv_cache 256 MiB" in said and f"cluster.device_bytes={least}" in said
    assert said.endswith("nearest that fits: trainer.offload=memory reference.offload=memory")
    without_reference = ledger(COLOCATED, "reference.offload=memory").largest().total
    with pytest.raises(ConfigError, match=r"nearest that fits: reference.offload=memory$"):
        checked(budget(without_reference, COLOCATED))
    with pytest.raises(ConfigError, match="whatever is offloaded"):
        checked(budget(least - 1, COLOCATED, *AWAY))


def test_engines_on_devices_of_their_own_are_asked_too() -> None:
    largest = ledger().largest().total
    assert largest < 2**28
    with pytest.raises(
        ConfigError, match=r"engine worker 0 has .*engine.kv_cache 256 MiB.*lower rollout.kv_cache_bytes"
    ):
        checked(budget(largest))


def test_a_streamed_optimizer_has_one_bucket_on_the_device_in_an_update() -> None:
    whole, streamed = ledger(*AWAY), ledger(*AWAY, "trainer.stream_optimizer_bytes=100_000")
    update, before = streamed.at(Phase.UPDATE, 0), whole.at(Phase.UPDATE, 0)
    assert update.device["actor.optimizer_bucket"] < before.device["actor.optimizer"]
    assert "actor.optimizer" not in update.device and "actor.optimizer_bucket" not in before.device
    assert update.memory == before.memory + before.device["actor.optimizer"]
    for phase in set(streamed.phases) - {Phase.UPDATE}:
        assert streamed.at(phase, 0).total == whole.at(phase, 0).total
    stays = ledger("trainer.stream_optimizer_bytes=100_000").at(Phase.UPDATE, 0)
    assert stays.device["actor.optimizer"] == before.device["actor.optimizer"]


def test_host_memory_and_disk_have_budgets() -> None:
    found = ledger(*AWAY)
    ranks = sum(max(found.at(phase, rank).memory for phase in found.phases) for rank in range(2))
    checked(budget(2**40, *AWAY, host_bytes=ranks))
    with pytest.raises(ConfigError, match=f"cluster.host_bytes={ranks - 1}; raise it, or set a role's offload to disk"):
        checked(budget(2**40, *AWAY, host_bytes=ranks - 1))
    checked(budget(2**40, *AWAY, host_bytes=ranks // 2), nodes=2)
    asleep = ("model.lora.rank=4", COLOCATED, "rollout.offload=memory")
    kept = sum(rank.get("engine.weights", 0) for rank in ledger(*asleep).ranks)
    checked(budget(2**40, *asleep, host_bytes=kept))
    with pytest.raises(ConfigError, match="a role's offload to disk, or rollout.offload to sleep"):
        checked(budget(2**40, *asleep, host_bytes=kept - 1))
    on_disk = ledger("trainer.offload=disk")
    most = max(on_disk.at(phase, 0).disk for phase in on_disk.phases)
    checked(budget(2**40, "trainer.offload=disk", f"trainer.offload_disk_bytes={most}"))
    with pytest.raises(ConfigError, match=f"trainer.offload_disk_bytes={most - 1}; raise it"):
        checked(budget(2**40, "trainer.offload=disk", f"trainer.offload_disk_bytes={most - 1}"))
