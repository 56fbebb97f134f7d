"""Published weights as files: manifests, what is kept, the proof of an engine's pieces, the gate that follows, and
settings that are refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.core.config.job import StoreConfig
from megarl.core.errors import CheckpointError, EngineError, WeightsDiffer
from megarl.core.published import KEPT, MANIFEST, PublishedWeights, folder_of, remove_old, whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engine.client.control import EngineControl
from megarl.engine.sync.files import read_files
from megarl.explore.explorer import explorer
from megarl.explore.explorer.gates import FileFedEngines, NewestVersion, gated_engines
from megarl.explore.explorer.weight_files import FileFedEngine, check_pieces
from megarl.explore.store import Store
from megarl.ops import slice_digest
from megarl.weights.reshard.execute import piece_digests
from megarl.weights.reshard.layouts import hf_layout, vllm_layout
from tests.stores import make_task
from tests.unit.reshard_cases import qwen3_config
from tests.unit.small_job import config_of

MANY = PublishedWeights("1.1", {"a": "0f"}, [1, 2], [-0.5], 1e-3)


def publish(run_dir: Path, *versions: str) -> None:
    for version in versions:
        folder_of(run_dir, version).mkdir(parents=True)
        MANY.write(folder_of(run_dir, version))


def test_a_folder_is_whole_with_its_manifest_and_the_newest_stay(tmp_path: Path) -> None:
    publish(tmp_path, "1.2", "1.10", "2.1")
    for name in ("1.9", ".1.8.partial", "2.2", ".2.3.partial", "notes"):
        (tmp_path / "weights" / name).mkdir()
    assert whole_versions(tmp_path) == [WeightsVersion(1, 2), WeightsVersion(1, 10), WeightsVersion(2, 1)]
    assert PublishedWeights.read(folder_of(tmp_path, "2.1")) == MANY
    remove_old(tmp_path)
    left = {path.name for path in (tmp_path / "weights").iterdir()}
    assert left == {"1.10", "2.1", "2.2", ".2.3.partial", "notes"} and len(whole_versions(tmp_path)) == KEPT


@pytest.mark.parametrize("text", ["", "[]", '{"version": "1.1"}'])
def test_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        PublishedWeights.read(tmp_path)


def test_a_manifest_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a trainer that has published newer ones: the engine is given one of those."""
    publish(tmp_path, "1.1")
    is_file = Path.is_file

    def seen_and_removed(path: Path) -> bool:
        seen = is_file(path)
        path.unlink()
        return seen

    monkeypatch.setattr(Path, "is_file", seen_and_removed)
    with pytest.raises(CheckpointError, match=MANIFEST):
        PublishedWeights.read(folder_of(tmp_path, "1.1"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2)])  # 4: keys and values on two workers each
def test_workers_read_their_slices_and_prove_the_whole(tmp_path: Path, tp: int, pp: int, tied: bool) -> None:
    config = qwen3_config() | {"tie_word_embeddings": tied}
    whole = {name: torch.randn(shape) for name, shape in hf_layout(config).tensors.items()}
    save_file(whole, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    published = {n: f"{slice_digest(t, start=(0,) * t.dim(), shape=tuple(t.shape)):016x}" for n, t in whole.items()}
    layout = vllm_layout(config, tp, pp=pp)
    held: list[dict[str, torch.Tensor]] = []
    for rank in range(tp * pp):
        local = {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}
        counts = defaultdict[str, int](int)

        def wrote(name: str, number: int, counts: dict[str, int] = counts) -> None:
            counts[name] += number

        read_files(layout, rank, local.__getitem__, wrote, tmp_path, torch.float32)
        assert counts == {name: prod(tensor.shape) for name, tensor in local.items()}
        assert not any(tensor.isnan().any() for tensor in local.values())
        held.append(local)

    def proofs() -> list[list[list[Any]]]:
        found = [piece_digests(layout, rank, local.__getitem__) for rank, local in enumerate(held)]
        return [[[tensor, [list(axis) for axis in box], f"{d:016x}"] for tensor, box, d in pieces] for pieces in found]

    workers = proofs()
    check_pieces(published, workers)
    with pytest.raises(WeightsDiffer, match=r"up_proj\.weight: published \w+, found nothing"):
        check_pieces(published, [[piece for piece in pieces if "up_proj" not in piece[0]] for pieces in workers])
    for local in held:
        name = next(n for n in local if "layers" in n)
        local[name].view(-1)[0] += 1
        with pytest.raises(WeightsDiffer, match=r"model\.layers\.\d"):
            check_pieces(published, proofs())
        local[name].view(-1)[0] -= 1


def test_copies_that_differ_are_named() -> None:
    pieces = [["a", [[0, 2]], "0f"]]
    check_pieces({"a": "000000000000000f"}, [pieces, pieces])
    with pytest.raises(WeightsDiffer, match="a: .* in copies that differ"):
        check_pieces({"a": "000000000000000f"}, [pieces, [["a", [[0, 2]], "10"]]])


def test_files_of_a_version_that_the_store_does_not_know_are_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, newest = Store(url), NewestVersion(tmp_path, StoreConfig(url=url))
    store.begin_attempt(2)
    assert newest() is None
    publish(tmp_path, "1.5", "2.1", "3.1")
    store.pacing.record_version(WeightsVersion(1, 5), 4)
    store.pacing.record_version(WeightsVersion(2, 2), 4)
    assert newest() == WeightsVersion(1, 5), "2.1 and 3.1 are not known, 2.2 is not whole"
    publish(tmp_path, "2.2")
    assert newest() == WeightsVersion(2, 2)
    (folder_of(tmp_path, "2.2") / MANIFEST).unlink()
    assert newest() == WeightsVersion(1, 5)
    store.close()


class Fed(FileFedEngine):
    """An engine that takes what it is given, while it is up."""

    def __init__(self) -> None:
        super().__init__(EngineControl("http://unused", "key"), Path("unused"))
        self.up, self.given, self.fault = True, list[WeightsVersion](), ""

    def give(self, version: WeightsVersion) -> bool:
        if self.fault:
            raise EngineError(self.fault)
        if self.up and version not in self.given:
            self.given.append(version)
        return self.up


async def after(seconds: float, fed: FileFedEngines, work: Any) -> None:
    """Run ``work`` beside the engines, as an explorer does."""

    async def closed() -> None:
        closings.append(True)

    closings: list[bool] = []
    keeping = asyncio.create_task(fed.keep(seconds, closed))
    try:
        await asyncio.wait_for(work(closings), 10)
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


def test_the_gate_follows_versions_and_opens_with_them() -> None:
    published: list[WeightsVersion] = []
    engines = [Fed(), Fed()]
    fed = FileFedEngines(engines, lambda: max(published, default=None), every_s=0.05)
    first, second, third = (WeightsVersion(1, n) for n in (1, 2, 3))

    async def work(closings: list[bool]) -> None:
        while not closings:
            await asyncio.sleep(0.01)
        assert not fed.gate.is_open and engines[0].given == []
        published.append(first)
        await fed.gate.wait()
        published.append(second)
        fed.expect(second)  # groups of it were claimed before the gate has seen it
        assert not fed.gate.is_open
        await fed.gate.wait()
        assert engines[0].given == engines[1].given == [first, second]
        fed.expect(first)
        assert fed.gate.is_open, "samples of older weights wait for nothing"
        engines[1].up = False
        published.append(third)
        while engines[0].given[-1] != third:
            await asyncio.sleep(0.01)
        await fed.gate.wait()
        engines[1].up = True
        while engines[1].given[-1] != third:
            await asyncio.sleep(0.01)

    asyncio.run(after(0.2, fed, work))


def test_an_engine_that_is_being_fed_gives_no_claims_back() -> None:
    engine = Fed()
    engine.up, engine.updating = False, True
    fed = FileFedEngines([engine], lambda: WeightsVersion(1, 1), every_s=0.05)

    async def work(closings: list[bool]) -> None:
        await asyncio.sleep(0.5)
        assert not closings
        engine.updating = False
        while not closings:
            await asyncio.sleep(0.01)

    asyncio.run(after(0.1, fed, work))


UPDATE = [
    "/collective_rpc megarl_abandon_update",
    "/pause?mode=abort",
    "/collective_rpc megarl_expect_files",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/collective_rpc megarl_piece_digests",
    "/megarl/refuse",
    "/resume",
    "/inference/v1/generate",
    "/megarl/refuse",
]
"""Calls by which an engine is given weights that follow no others of the same attempt."""


class Updated(ThreadingHTTPServer):
    """An engine's server: it keeps the calls, and the state that they make."""

    def __init__(self, while_probed: Callable[[], None]) -> None:
        super().__init__(("127.0.0.1", 0), UpdatedHandler)
        self.calls: list[str] = []
        self.state: dict[str, Any] = {"version": "default", "paused": False, "refusing": "new", "start": 1}
        self.looks = 0
        self.while_probed = while_probed

    def answer(self, path: str, body: Any) -> Any:
        method = f" {body['method']}" if path == "/collective_rpc" else ""
        self.calls.append(f"{path}{method}")
        if path == "/finish_weight_update":
            self.state["version"] = body["weight_version"]
        if path == "/megarl/refuse":
            self.state["refusing"] = body["reason"]
        if path.startswith(("/pause", "/resume")):
            self.state["paused"] = path != "/resume"
        if path == "/inference/v1/generate":
            self.while_probed()
            content = {"token_ids": [0], "logprobs": {"content": [{"logprob": -0.5}]}}
            return {"prompt_logprobs": [None, {"2": {"logprob": -0.5}}], "choices": [content]}
        return {"results": [{"pieces": [["a", [[0, 1]], "f"]]}], "success": True}


class UpdatedHandler(BaseHTTPRequestHandler):
    server: Updated

    def do_GET(self) -> None:
        self.server.looks += 1
        self.reply(self.server.state | {"workers": 1})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply(self.server.answer(self.path, json.loads(body) if body else None))

    def reply(self, answer: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_one_explorer_of_a_program_gives_its_engines_the_files(tmp_path: Path) -> None:
    """The other one asks an engine once its weights are proven: not before, though the engine has the files by then."""
    config = config_of(tmp_path, "sync.method=checkpoint", "rollout.explorers=2", "reward.workers=2")
    store, open_while_probed = Store(config.store.url), list[bool]()
    store.begin_attempt(1)

    def while_probed() -> None:
        until = engine.looks + 3  # of the other explorer
        for _ in range(1000):
            if engine.looks < until and not gates[1].gate.is_open:
                time.sleep(0.01)
        open_while_probed.append(gates[1].gate.is_open)

    def give(version: WeightsVersion) -> None:
        folder_of(tmp_path, version).mkdir(parents=True)
        replace(MANY, version=str(version), digests={"a": f"{15:016x}"}).write(folder_of(tmp_path, version))
        store.pacing.record_version(version, version.n)
        for gated in gates:
            gated.expect(version)

    async def closed() -> None:
        raise AssertionError("no claims are given back")

    async def main() -> None:
        keeping = [asyncio.create_task(gated.keep(60.0, closed)) for gated in gates]
        for n in (1, 2):
            give(WeightsVersion(n, 1))
            await asyncio.gather(*(gated.gate.wait() for gated in gates))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    with Updated(while_probed) as engine:
        Thread(target=engine.serve_forever, daemon=True).start()
        gates = [gated_engines(config, [f"http://127.0.0.1:{engine.server_port}"], "k", number) for number in range(2)]
        asyncio.run(asyncio.wait_for(main(), 30))
        engine.shutdown()
    store.close()
    assert engine.calls == 2 * UPDATE and open_while_probed == [False, False]


def test_other_weights_end_whoever_waits() -> None:
    engine = Fed()
    engine.fault = "weights 1.1 are refused"
    fed = FileFedEngines([engine], lambda: WeightsVersion(1, 1))

    async def work() -> None:
        with pytest.raises(EngineError, match="are refused"):
            await fed.gate.wait()

    asyncio.run(work())


def test_leftover_groups_wait_for_the_weights_of_the_trainer_that_goes_on(tmp_path: Path) -> None:
    """Whoever claims them before the gate has seen these asks no engine that has those of the killed attempt."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(0)])
    for n in (1, 2, 3):
        store.pacing.record_version(WeightsVersion(1, n), n - 1)
        store.pacing.record_live(WeightsVersion(1, n))
    store.rollouts.request("r0", "train", 0, WeightsVersion(1, 1), ["train/0"], 2, {"max_tokens": 8})
    published, engine = [WeightsVersion(1, 3)], Fed()
    fed = FileFedEngines([engine], lambda: max(published), every_s=60.0)

    async def work(closings: list[bool]) -> None:
        await fed.gate.wait()
        [before] = store.groups.claim("a", 1)
        fed.expect(before.oldest)
        assert fed.gate.is_open and before.oldest == WeightsVersion(1, 1)
        store.rollouts.discard(1)
        store.begin_attempt(2)
        store.pacing.record_version(WeightsVersion(2, 1), 1)
        store.pacing.record_live(WeightsVersion(2, 1))
        [claim] = store.groups.claim("a", 1)
        assert explorer.sampling_of(claim).oldest == WeightsVersion(2, 1), "an engine that was left out gives nothing"
        fed.expect(claim.oldest)
        assert not fed.gate.is_open
        published.append(WeightsVersion(2, 1))
        await fed.gate.wait()
        assert engine.given == published

    asyncio.run(after(60.0, fed, work))
    store.close()
