"""How often a publication is tried in which engines die, and what its weights are compared with."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema import Config
from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import ProbeText
from megarl.train.ranks import RunContext
from megarl.train.sync import weights
from megarl.train.sync.publish import LEAST_BUCKET
from megarl.train.sync.weights import Stopped, WeightSync
from megarl.weights.reshard.execute import memory_for


class Syncs:
    """The engines, ranks and reporter of a job of one rank: each of ``failures`` ends one connection."""

    def __init__(
        self,
        *failures: WeightSyncError,
        died: tuple[str, ...] = ("no answer from the engine",),
        stop_after: int | None = None,
    ) -> None:
        self.failures = list(failures)
        self.said: list[str] = []
        self.left = stop_after
        self.changed, self.joined, self.bucket = False, 0, 4 * LEAST_BUCKET
        self.order: list[str] = []
        """Phases, memory that engines were given again, and the probe."""
        self.publisher = SimpleNamespace(
            connect=self.connect,
            come_and_go=False,
            died=lambda: list(died),
            engines_changed=lambda: self.changed,
            halve_buckets=self.halve_buckets,
            probe=self.probe,
        )
        self.models = SimpleNamespace(head=None)
        self.recorded: list[tuple[WeightsVersion, int]] = []

    def sync(self) -> WeightSync:
        ranks: Any = self
        models: Any = self.models
        publisher: Any = self.publisher
        context: Any = RunContext(Config(), None, 1, 0)  # type: ignore[arg-type]
        engines = SimpleNamespace(wake=self.order.append)
        turns: Any = SimpleNamespace(enter=self.order.append, during=lambda _: nullcontext(), engines=engines)
        return WeightSync(
            context,
            ranks,
            ranks,
            models,
            publisher,
            turns,
            lambda *version: self.recorded.append(version),
            links=publisher,
        )

    def connect(self) -> None:
        self.joined += 1
        if self.left is not None:
            self.left -= 1
        if self.failures:
            raise self.failures.pop(0)

    def halve_buckets(self) -> tuple[int, int] | None:
        if self.bucket // 2 < LEAST_BUCKET:
            return None
        self.bucket //= 2
        return 2 * self.bucket, self.bucket

    def probe(self, text: ProbeText) -> float:
        self.order.append("probe")
        return 0.0

    def agree(self, yes: bool) -> bool:
        return yes

    def stop_requested(self) -> bool:
        return self.left is not None and self.left <= 0

    def log(self, text: str) -> None:
        self.said.append(text)


def connect(s: Syncs) -> None:
    s.sync().connect()


def test_what_died_is_waited_for() -> None:
    s = Syncs(*[WeightSyncError("the link is down")] * 3)
    connect(s)
    assert (
        s.said
        == ["an engine died in a weight sync (no answer from the engine); waiting for the one that replaces it"] * 3
    )


def test_the_last_failure_tells_how_often_it_was_tried() -> None:
    s = Syncs(*[WeightSyncError("the link is down")] * 5)
    with pytest.raises(
        WeightSyncError,
        match=r"the link is down \(tried 4 times, an engine died each time; no answer from the engine\)",
    ):
        connect(s)
    assert len(s.failures) == 1


@pytest.mark.parametrize(
    ("failure", "died"), [(WeightSyncError("of the trainer"), ()), (WeightsDiffer("a tensor"), ("no answer",))]
)
def test_what_another_engine_would_not_mend_is_raised_at_once(failure: WeightSyncError, died: tuple[str, ...]) -> None:
    s = Syncs(failure, died=died)
    with pytest.raises(type(failure)) as raised:
        connect(s)
    assert raised.value is failure


def test_a_stop_ends_the_wait_for_a_replacement() -> None:
    """A job that stops starts no engine: to wait for one would take the time in which a checkpoint can be saved."""
    s = Syncs(*[WeightSyncError("the link is down")] * 3, stop_after=2)
    with pytest.raises(Stopped, match="the link is down"):
        connect(s)
    assert len(s.said) == 1 and len(s.failures) == 1


def test_a_stop_hides_no_difference_of_weights() -> None:
    s = Syncs(WeightsDiffer("a tensor"), stop_after=0)
    with pytest.raises(WeightsDiffer):
        connect(s)


def no_room(count: int) -> list[WeightSyncError]:
    """Errors of an allocation that really fails, as they come over from an engine."""
    with pytest.raises(WeightSyncError) as raised, memory_for(1 << 50):
        torch.empty(1 << 50)
    return [WeightSyncError(f"weights 1.1 did not reach the engines whole: {raised.value}")] * count


def test_buckets_are_halved_until_there_is_memory_for_them() -> None:
    s = Syncs(*no_room(2), died=())
    connect(s)
    assert s.bucket == LEAST_BUCKET and s.joined == 3 and len(s.said) == 2
    assert f"sync.bucket_bytes {4 * LEAST_BUCKET} -> {2 * LEAST_BUCKET}" in s.said[0]


def test_no_bucket_is_halved_below_the_least() -> None:
    s = Syncs(*no_room(3), died=())
    with pytest.raises(WeightSyncError, match="no memory for a bucket of"):
        connect(s)
    assert s.bucket == LEAST_BUCKET and s.joined == 3


@pytest.mark.parametrize("updated", [False, True])
def test_weights_that_an_update_has_changed_are_another_version(monkeypatch: pytest.MonkeyPatch, updated: bool) -> None:
    """An engine is replaced while the groups of the next step are awaited, after the update of this one."""
    s = Syncs()
    given: list[WeightsVersion] = []

    def publish(tensors: Any, version: WeightsVersion, *, written: Any, abort: bool, probe: Any) -> Any:
        given.append(version)
        return SimpleNamespace(metrics=dict)

    s.publisher.publish = publish
    s.models.actor = SimpleNamespace(model=SimpleNamespace(adapters=None, tensors={}, written=dict))
    sync = s.sync()
    monkeypatch.setattr(weights, "probe_text", lambda *_, **__: ProbeText([], [], 1.0))
    sync.publish(4)
    assert s.joined == 0
    sync.publish_again("the engine at e is another", 4 + updated)
    assert given == [WeightsVersion(1, 1), WeightsVersion(1, 2 if updated else 1)] and sync.version == given[-1]
    assert s.recorded == [(WeightsVersion(1, 1), 4), *([(WeightsVersion(1, 2), 5)] if updated else [])]


def test_other_weights_are_never_sent_under_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update was made, and the caller counts it in no step."""
    s = Syncs()
    digests = {"w": 7, "v": 8}
    s.publisher.publish = lambda *_, **__: SimpleNamespace(metrics=dict)
    s.models.actor = SimpleNamespace(model=SimpleNamespace(adapters=None, tensors={}, written=lambda: dict(digests)))
    sync = s.sync()
    monkeypatch.setattr(weights, "probe_text", lambda *_, **__: ProbeText([], [], 1.0))
    sync.publish(4)
    sync.publish_again("the engine at e is another", 4)
    digests["w"] = 9
    with pytest.raises(
        WeightsDiffer, match=r"weights 1\.1 .* 1 tensors of this rank have changed since, the first is w"
    ):
        sync.publish_again("the engine at e is another", 4)
    sync.publish(5)


def test_what_is_sent_is_compared_with_what_the_optimizer_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Syncs()
    given: list[Any] = []

    def publish(tensors: Any, version: Any, *, written: Any, abort: bool, probe: Any) -> Any:
        given.extend([tensors, version, written])
        return SimpleNamespace(metrics=lambda: {"sync/bytes": 4.0})

    weight = torch.ones(1)
    s.publisher.publish = publish
    s.models.actor = SimpleNamespace(
        model=SimpleNamespace(adapters=None, tensors={"w": weight}, written=lambda: {"w": 7})
    )
    sync = s.sync()
    monkeypatch.setattr(weights, "probe_text", lambda *_, **__: ProbeText([], [], 1.0))
    assert sync.publish(0) == {"sync/bytes": 4.0, "sync/probe_diff_max": 0.0}
    assert s.order == ["sync", "sync", "weights", "rollout", "kv_cache", "probe"]
    assert given == [{"w": weight}, WeightsVersion(1, 1), {"w": 7}] and sync.version == WeightsVersion(1, 1)


def test_engines_that_are_wanted_anew_are_joined_before_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, one was absent by order and comes back: nobody has died, and it needs the weights all the same."""
    s = Syncs()
    order: list[str] = []
    s.publisher.connect = lambda: order.append("joined")
    s.publisher.publish = lambda *_, **__: order.append("published") or SimpleNamespace(metrics=dict)
    s.models.actor = SimpleNamespace(model=SimpleNamespace(adapters=None, tensors={}, written=dict))
    sync = s.sync()
    monkeypatch.setattr(weights, "probe_text", lambda *_, **__: ProbeText([], [], 1.0))
    for s.changed in (False, True):
        sync.publish(0)
    assert order == ["published", "joined", "published"]
