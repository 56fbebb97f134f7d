"""Published weights as files: manifests, what is kept, the proof of an engine's pieces, the gate that follows, and
settings that are refused."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.buffer.store import Store
from megarl.config.job import StoreConfig
from megarl.core.errors import CheckpointError, EngineClosed, EngineError, WeightsDiffer
from megarl.core.published import KEPT, MANIFEST, PublishedWeights, folder_of, remove_old, whole_versions
from megarl.core.schema import WeightsVersion
from megarl.engines.client.control import EngineControl
from megarl.engines.client.engine_choice import EngineChoice, WantedWeights
from megarl.engines.fleet import BASE, EngineRow, Key
from megarl.engines.sync.files import read_files
from megarl.explore.explorer import explorer
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.explore.explorer.weight_files import FileFedEngine, FileFeeder, NewestVersion, check_pieces
from megarl.ops import slice_digest
from megarl.tasks import ChatTokenizer
from megarl.weights.reshard.execute import piece_digests
from megarl.weights.reshard.layouts import hf_layout, vllm_layout
from tests.chat_battery import checkpoint
from tests.engine_rows import serving_row
from tests.stores import make_task
from tests.unit.reshard_cases import qwen3_config
from tests.unit.small_job import config_of
from tests.unit.test_spare import Scorer

OLD = WeightsVersion(1, 1)
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

    def give(self, version: WeightsVersion) -> int | None:
        if self.fault:
            raise EngineError(self.fault)
        if self.up and version not in self.given:
            self.given.append(version)
        return 7 if self.up else None


class Program:
    """Engines of an explore program, whose processes are start 7, and what gives them published weights."""

    def __init__(self, number: int) -> None:
        self.engines = [Fed() for _ in range(number)]
        self.published: list[WeightsVersion] = []
        self.rows = [serving_row(n, f"http://{n}", start=7) for n in range(number)]
        self.choice = EngineChoice(self.rows)
        self.feeder = FileFeeder(
            self.choice, lambda row: self.engines[row.number], lambda: max(self.published, default=None)
        )

    async def read(self) -> list[EngineRow]:
        return list(self.rows)

    async def delivered(self, starts: Mapping[Key, int], version: WeightsVersion | None) -> None:
        for (_, number), start in starts.items():
            if self.rows[number].start == start:
                self.rows[number] = self.rows[number].with_weights(BASE, version)

    async def beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` beside the engines, as an explorer does."""
        keeping = [
            asyncio.create_task(task) for task in (self.choice.keep(self.read), self.feeder.keep(self.delivered))
        ]
        await asyncio.wait_for(work(), 10)
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    async def until(self, *has: WeightsVersion | None) -> None:
        while [row.has for row in self.rows] != list(has):
            await asyncio.sleep(0.01)


def test_engines_are_given_each_version_and_their_rows_say_so() -> None:
    program = Program(2)
    engines, choice = program.engines, program.choice
    first, second, third = (WeightsVersion(1, n) for n in (1, 2, 3))

    async def work() -> None:
        await asyncio.sleep(0.2)
        assert not choice.is_open and engines[0].given == []
        program.published.append(first)
        assert (await choose(choice, None)).has == first
        assert choice.is_open
        program.published.append(second)
        assert (await choose(choice, second)).has == second, "groups of it were claimed before it was given"
        await program.until(second, second)
        assert engines[0].given == engines[1].given == [first, second]
        engines[1].up = False
        program.published.append(third)
        await program.until(third, None)
        engines[1].up = True
        await program.until(third, third)

    asyncio.run(program.beside(work))


async def choose(engines: EngineChoice, oldest: WeightsVersion | None) -> EngineRow:
    """An engine once one has the weights."""
    while True:
        with suppress(EngineClosed):
            row = await engines.choose(WantedWeights(oldest))
            if row.has is not None:
                return row
        await asyncio.sleep(0.01)


def test_claims_are_given_back_where_no_engine_has_the_weights_and_none_is_given_some(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(0)])
    store.rollouts.request("r0", "train", 0, OLD, ["train/0"], 1, {"max_tokens": 8})
    store.engines.register([serving_row(0, "http://unused", version=OLD)])
    updated, looks = [True], list[bool]()
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))

    async def are_updated() -> bool:
        looks.append(updated[0])
        return updated[0]

    class Waiting:
        """Waits for weights, which the engine loses once it is asked."""

        async def generate(self, prompts: Any, sampling: Any) -> Any:
            store.engines.delivered({("train", 0): 1}, None)
            await asyncio.Event().wait()
            yield

    async def main() -> None:
        asked = AskedEngines(Waiting(), EngineChoice(()), are_updated)
        claims = ClaimSettings("a", capacity=4, poll_s=0.005, silence_s=0.05)
        exploring = asyncio.create_task(Explorer(store, asked, Scorer(), tokenizer, claims).run())
        while len(looks) < 3:
            await asyncio.sleep(0.01)
        assert store.groups.states("r0")["r0/0"][0] == "claimed"
        updated[0] = False
        while store.groups.states("r0")["r0/0"][0] != "pending":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [claim.attempt for claim in store.groups.claim("another", 1)] == [2], "it claims nothing without weights"
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))
    store.close()


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
    store, usable_while_probed, version = Store(config.store.url), list[bool](), OLD
    store.begin_attempt(1)

    def while_probed() -> None:
        with closing(Store(config.store.url, read_only=True)) as other:
            usable_while_probed.append(bool(EngineChoice(other.engines.own()).usable(WantedWeights(version))))

    async def main(url: str) -> None:
        nonlocal version
        row = serving_row(0, url)
        store.engines.register([row])
        engines = EngineChoice([row])

        async def read() -> list[EngineRow]:
            return store.engines.own()

        async def delivered(starts: Mapping[Key, int], version: WeightsVersion | None) -> None:
            store.engines.delivered(starts, version)

        feeder = FileFeeder.of(config, engines, "k")
        keeping = [asyncio.create_task(work) for work in (engines.keep(read), feeder.keep(delivered))]
        for n in (1, 2):
            version = WeightsVersion(n, 1)
            folder_of(tmp_path, version).mkdir(parents=True)
            replace(MANY, version=str(version), digests={"a": f"{15:016x}"}).write(folder_of(tmp_path, version))
            store.pacing.record_version(version, version.n)
            assert (await choose(engines, version)).has == version
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    with Updated(while_probed) as engine:
        Thread(target=engine.serve_forever, daemon=True).start()
        asyncio.run(asyncio.wait_for(main(f"http://127.0.0.1:{engine.server_port}"), 30))
        engine.shutdown()
    store.close()
    assert engine.calls == 2 * UPDATE and usable_while_probed == [False, False]


def test_other_weights_than_were_given_end_the_explorer() -> None:
    program = Program(1)
    program.engines[0].fault, program.published = "weights 1.1 are refused", [WeightsVersion(1, 1)]
    with pytest.raises(EngineError, match="are refused"):
        asyncio.run(program.feeder.keep(program.delivered))


def test_leftover_groups_wait_for_the_weights_of_the_trainer_that_goes_on(tmp_path: Path) -> None:
    """Whoever claims them before the gate has seen these asks no engine that has those of the killed attempt."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(0)])
    for n in (1, 2, 3):
        store.pacing.record_version(WeightsVersion(1, n), n - 1)
        store.pacing.record_live(WeightsVersion(1, n))
    store.rollouts.request("r0", "train", 0, WeightsVersion(1, 1), ["train/0"], 2, {"max_tokens": 8})
    program = Program(1)
    program.published.append(WeightsVersion(1, 3))

    async def work() -> None:
        [before] = store.groups.claim("a", 1)
        assert (await choose(program.choice, before.oldest)).has == WeightsVersion(1, 3)
        assert before.oldest == WeightsVersion(1, 1)
        store.rollouts.discard(1)
        store.begin_attempt(2)
        store.pacing.record_version(WeightsVersion(2, 1), 1)
        store.pacing.record_live(WeightsVersion(2, 1))
        [claim] = store.groups.claim("a", 1)
        oldest = explorer.sampling_of(claim, program.choice).oldest
        assert oldest == WeightsVersion(2, 1), "an engine that was left out gives nothing"
        with pytest.raises(EngineClosed):
            await program.choice.choose(WantedWeights(oldest))
        program.published.append(oldest)
        assert (await choose(program.choice, oldest)).has == oldest
        assert program.engines[0].given == program.published

    asyncio.run(program.beside(work))
    store.close()
