"""Trainer ranks without a trainer: threads, each with its own publisher and link; processes make no difference to
either."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from transformers import PreTrainedModel

from megarl.config.schema import Config
from megarl.core.errors import EngineError, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.client import Sampling
from megarl.engines.client.probe import PROBE_TOLERANCES, ProbeText
from megarl.learn.parallel.grid import megatron_grid
from megarl.learn.training.optimizer import whole_digests
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.publication import SyncReport
from megarl.train.sync.publish import WeightPublisher
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.execute import Arrival, Transport, Work
from megarl.weights.reshard.layouts import Layout, megatron_layout
from tests.engine_rows import FixedEngines
from tests.loop.engines import RunningEngine, some_prompts
from tests.parallel.models import logical_tensors

T = TypeVar("T")
versions = (WeightsVersion(1, n) for n in itertools.count(1))


@dataclass(frozen=True)
class Ranks:
    """Publishers that share an engine."""

    publishers: tuple[WeightPublisher, ...]
    layout: Layout

    def call(self, do: Callable[[int, WeightPublisher], T]) -> list[T | Exception]:
        """What every rank returned or raised; they run at the same time."""

        def one(rank: int) -> T | Exception:
            try:
                return do(rank, self.publishers[rank])
            except (EngineError, WeightSyncError) as error:
                return error

        with ThreadPoolExecutor(len(self.publishers)) as pool:
            return list(pool.map(one, range(len(self.publishers))))

    def publish(
        self,
        model: PreTrainedModel,
        version: WeightsVersion,
        trained: PreTrainedModel | None = None,
        probe: ProbeText | None = None,
    ) -> list[SyncReport | Exception]:
        """``trained``: has the weights that an optimizer last wrote, where they are others than those that are sent."""
        full = checkpoint_tensors(model)
        right = full if trained is None else checkpoint_tensors(trained)

        def one(rank: int, publisher: WeightPublisher) -> SyncReport:
            written = whole_digests(shards(right, self.layout, rank))
            return publisher.publish(shards(full, self.layout, rank), version, written=written, probe=probe)

        return self.call(one)

    def publish_whole(self, model: PreTrainedModel) -> SyncReport:
        """Publishes, reconnecting first when a failure has broken the link; fails the test unless it succeeds."""
        if any(p.connection.transport is None for p in self.publishers):
            assert self.call(lambda rank, p: p.connect()) == [None] * len(self.publishers)
        first, *others = self.publish(model, next(versions))
        assert isinstance(first, SyncReport), first
        assert others == [first] * len(others)
        return first


def ranks_of(engine: RunningEngine, config: Config | None = None, others: Sequence[RunningEngine] = ()) -> Ranks:
    config = config or engine.config
    hf_config = read_hf_config(engine.model_path)
    layout = megatron_layout(hf_config, megatron_grid(config.parallel))
    addresses = engine.addresses()
    engines = FixedEngines(lambda: [e.url for e in (engine, *others)], addresses.key)
    connections = (
        EngineConnection(config, layout, hf_config, r, look=engines, addresses=addresses)
        for r in range(layout.num_ranks)
    )
    return Ranks(tuple(WeightPublisher(connection, engines) for connection in connections), layout)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's logical tensors; transformers keeps experts stacked while they are in memory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return logical_tensors(Path(folder))


def shards(full: dict[str, torch.Tensor], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """What a Megatron rank would hold of this model, in float32; padding is NaN, which must reach no engine."""
    out = {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}
    for piece in layout.pieces(rank):
        box = boxes.index_of(boxes.start_of(piece.box), boxes.shape_of(piece.box))
        out[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))] = full[piece.tensor][box]
    return out


class Flipping:
    """Flips one bit of the ``nth`` message on its way."""

    def __init__(self, inner: Transport, nth: int) -> None:
        self._inner = inner
        self._left = nth

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        return self._inner.allocate(nbytes)

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        if self._left == 0:
            message.view(torch.int32)[17] ^= 1 << 20
        self._left -= 1
        return self._inner.isend(message, rank)

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor], /) -> Arrival:
        raise AssertionError("trainer ranks only send")


class Breaking(Flipping):
    """Fails at the ``nth`` message, as a connection would."""

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        if self._left == 0:
            raise RuntimeError("the cable was cut")
        self._left -= 1
        return self._inner.isend(message, rank)


class Losing(Flipping):
    """Sends all but the ``nth`` message."""

    def isend(self, message: torch.Tensor, rank: int, /) -> Work:
        self._left -= 1
        return Sent() if self._left == -1 else self._inner.isend(message, rank)


class Sent:
    def wait(self) -> None:
        """Nothing is on its way."""


def refusing(engine: RunningEngine) -> str:
    """Fails the test unless the engine refuses; returns its words."""
    with pytest.raises(EngineError) as refused:
        engine.generate(some_prompts(1), Sampling(max_tokens=1))
    assert "503" in str(refused.value)
    return str(refused.value)


def probe(tokens: Sequence[int], logp: Sequence[float]) -> ProbeText:
    """Text with the tolerance of a float32 job that sets none."""
    return ProbeText(tokens, logp, PROBE_TOLERANCES["float32"])
