"""``megarl scale``: what is refused, what is ordered, and who notices engines that come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.buffer.store import EngineRoom, Store
from megarl.config import save_resolved
from megarl.core.errors import ConfigError, EngineClosed, EngineError
from megarl.core.jobs import of_program
from megarl.core.schema import WeightsVersion
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.engine_choice import EngineChoice, WantedWeights
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn
from megarl.explore.explorer.explorer import urls_of_the_start
from megarl.run.launch.scale import scale
from megarl.run.nodes.plan import NodeInfo, plan_job, workers_of
from megarl.run.process import ports
from megarl.run.run_dir.owner import own_run_dir
from megarl.run.supervise.engines import room_for_engines
from megarl.train.sync.fleet import EngineFleet
from megarl.train.sync.look import EngineLook
from tests.engine_rows import having, serving_row
from tests.unit.reshard_cases import qwen3_config
from tests.unit.small_job import config_of
from tests.unit.test_rollout_client import sample, streaming

ROOM = EngineRoom(1, 3, "3 CPUs")
ASKED_BY_WORKERS = ["reward.judge.url=rollout", "reward.path=reward.py"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model's configuration."""
    path: Path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(qwen3_config()))
    return path


@contextmanager
def running(folder: Path, *overrides: str, programs: tuple[str, ...] = ("train",), engines: int = 1) -> Iterator[Store]:
    """A run whose programs hold their locks, and have registered engines."""
    config = config_of(folder, *overrides)
    with ExitStack() as stack:
        for program in programs:
            stack.enter_context(own_run_dir(folder, program))
            save_resolved(config, folder / f"{of_program('resolved', program)}.json")
            store = Store(config.store.url, program=program)
            rows = [serving_row(i, f"http://{program}:{i}", program) for i in range(engines)]
            store.engines.register(rows, ROOM)
            stack.callback(store.close)
        save_resolved(config, folder / "resolved.json")
        yield store


def test_engines_are_ordered_by_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with running(tmp_path) as store:
        for number in (3, 3, 1, 2):
            scale(str(tmp_path), [f"engines={number}"])
        found = [(e.number, e.url, e.wanted_workers, e.wanted, e.order) for e in store.engines.own()]
    assert found == [(0, "http://train:0", 1, True, 0), (1, "", 1, True, 3), (2, "", 1, False, 2)]
    assert "engines 1 -> 3, 2 of them new" in caplog.text and "engines 1 -> 2" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("words", "overrides", "said"),
    [
        (["engines=0"], [], "engines=0: give a whole number of 1 or more"),
        (["engines=two"], [], "engines=two: give a whole number"),
        (["program=train"], [], "give engines=N, tp=M or both"),
        (["engines=2", "pp=2"], [], "pp is nothing that a run is scaled by"),
        (["tp=0"], [], "tp=0: give a whole number of 1 or more"),
        (["engines=4"], [], r"engines=4: the job has room for 3 of 1 workers each \(3 CPUs\)"),
        (["engines=2", "program=explore-7"], [], "program=explore-7: .* give one of program=train"),
        (["engines=2"], ["rollout.placement=colocated"], "rollout.placement=colocated"),
        (
            ["engines=1"],
            ["rollout.replicas=2", *ASKED_BY_WORKERS],
            "engines=1: .* function of reward.path may ask the rollout.replicas=2 engines",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], overrides: list[str], said: str) -> None:
    with running(tmp_path, *overrides) as store, pytest.raises(ConfigError, match=said):
        scale(str(tmp_path), words)
    assert [(e.wanted, e.order) for e in store.engines.own()] == [(True, 0)]


@pytest.mark.parametrize(
    ("words", "overrides", "said"),
    [
        (["tp=3"], [], "tp=3: .*3"),
        (["tp=2", "engines=2"], [], r"engines=2: the job has room for 1 of 2 workers each \(3 CPUs\)"),
        (["tp=2"], ["sync.deterministic=true"], "tp=2: sync.deterministic=true has the same bits"),
        (["tp=2"], ["cluster.device_bytes=1000"], "more than cluster.device_bytes=1000"),
        (["tp=2"], ASKED_BY_WORKERS, "tp=2: .* function of reward.path may ask the engines at the ports"),
    ],
)
def test_workers_that_are_refused(
    tmp_path: Path, model: Path, words: list[str], overrides: list[str], said: str
) -> None:
    with running(tmp_path, f"model.path={model}", *overrides) as store, pytest.raises(ConfigError, match=said):
        scale(str(tmp_path), words)
    assert [(e.wanted_workers, e.order) for e in store.engines.own()] == [(1, 0)]


def test_engines_get_other_workers(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    """Also where they are the judge, which follows them."""
    with running(tmp_path, f"model.path={model}", "rollout.replicas=2", "reward.judge.url=rollout") as store:
        for words in (["engines=2"], ["tp=1"], ["engines=1", "tp=2"], ["tp=2"]):
            scale(str(tmp_path), words)
        found = [(e.number, e.wanted_workers, e.wanted, e.order) for e in store.engines.own()]
    assert found == [(0, 2, True, 1), (1, 2, False, 2)]
    assert caplog.text.count("starts again in turn, with tp=2") == 1


def test_engines_are_scaled_while_one_is_compared(tmp_path: Path) -> None:
    """It is away for a moment, which is no order of this kind."""
    with running(tmp_path, engines=2) as store:
        store.engines.turn([0], EngineTurn.AWAY)
        scale(str(tmp_path), ["engines=1"])
        assert [(e.wanted, e.turn) for e in store.engines.own()] == [(True, EngineTurn.AWAY), (False, EngineTurn.HERE)]


def test_engines_of_a_node_that_leaves_are_ordered_away_once(tmp_path: Path) -> None:
    with running(tmp_path, engines=3) as store:
        for _ in range(2):
            store.engines.order_away({1})
        assert [(row.wanted, row.order) for row in store.engines.own()] == [(True, 0), (False, 1), (True, 0)]


def test_an_engine_that_was_refused_is_named_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as store:
        store.engines.scale("train", 2)
        store.engines.note([replace(store.engines.own()[1], done=1, refused="no room")])
        caplog.set_level("INFO")
        scale(str(tmp_path), ["engines=2"])
        refused = store.engines.own()[1]
    assert "engine 1 was not started when it was ordered last: no room" in caplog.text
    assert (refused.order, refused.is_refused) == (2, False)


def test_a_new_explorer_asks_engines_that_are_wanted_and_its_workers_those_of_the_start() -> None:
    """The judge, too. Where none is there for a moment, the judge asks all."""
    engines = [serving_row(i, f"http://train:{i}", wanted=wanted) for i, wanted in enumerate((False, True))]
    engines += [serving_row(2, "http://train:2"), serving_row(3, "")]
    chosen = EngineChoice(engines)
    assert [row.url for row in chosen.usable(WantedWeights())] == chosen.urls() == ["http://train:1", "http://train:2"]
    for away in (engines[0], replace(engines[1], turn=EngineTurn.ASLEEP)):
        chosen = EngineChoice([away])
        assert chosen.usable(WantedWeights()) == [] and chosen.urls() == [away.url]
    assert urls_of_the_start(engines, 2) == ["http://train:0", "http://train:1"]


def test_a_run_that_is_not_there_or_not_running_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no run"):
        scale(str(tmp_path / "typo"), ["engines=2"])
    assert not (tmp_path / "typo").exists()
    with running(tmp_path):
        pass
    with pytest.raises(ConfigError, match="no job that is running with engines"):
        scale(str(tmp_path), ["engines=2"])


def test_of_several_programs_one_is_named(tmp_path: Path) -> None:
    with running(tmp_path, programs=("explore-0", "explore-1")) as store:
        with pytest.raises(ConfigError, match="give one of program=explore-0, program=explore-1"):
            scale(str(tmp_path), ["engines=2"])
        scale(str(tmp_path), ["engines=2", "program=explore-0"])
        assert [len(store.engines.read([name])) for name in ("explore-0", "explore-1")] == [2, 1]


@pytest.mark.parametrize(
    ("overrides", "nodes", "most"),
    [
        ([], 1, 8),
        (["rollout.tp=2"], 1, 4),
        (["rollout.replicas=9"], 1, 9),
        ([], 2, 1),
        (["parallel.backend=nccl"], 1, 5),
        (["parallel.backend=nccl", "rollout.tp=2"], 1, 2),
        (["rollout.placement=colocated"], 1, 1),
    ],
)
def test_the_room_is_what_devices_leave(tmp_path: Path, overrides: list[str], nodes: int, most: int) -> None:
    config = config_of(tmp_path, "parallel.tp=1", *overrides)
    infos = [NodeInfo(rank, "", "all", 6) for rank in range(nodes)]
    room = room_for_engines(config, plan_job(config, infos[:1]), infos, cpus=8)
    workers = workers_of(config)
    assert room.most(workers, workers) == most and room.why


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_trainer_joins_engines_that_are_there(tmp_path: Path) -> None:
    """At its start it waits for all; later none that starts or is dead holds it up, unless none is there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    Thread(target=server.serve_forever, daemon=True).start()
    alive, dead = (f"http://127.0.0.1:{port}" for port in (server.server_port, ports.choose("127.0.0.1", 1, None)[0]))
    store = Store(f"sqlite:///{tmp_path}/store.db")

    def urls(*engines: EngineRow, begun: bool = True, together: bool = False) -> object:
        store.engines.register(engines)
        look = EngineLook(store, "k", own=True, together=together, begun=lambda: begun)
        rows = look.to_join()
        return rows if rows is None else [row.url for row in rows]

    up = serving_row(0, alive)
    starting, other = EngineStatus.STARTING, replace(up, number=1, url=alive.replace("127.0.0.1", "localhost"))
    gone = replace(up, url=dead), replace(up, number=1, url=dead)
    try:
        assert urls(up, gone[1]) == [alive]
        assert urls(up, replace(other, state=starting)) == [alive]
        assert urls(replace(up, state=starting), other) == [other.url]
        assert urls(up, other) == [alive, other.url]
        assert urls(up, replace(up, number=1, url="")) == [alive]
        both = (up, replace(gone[1], state=starting))
        assert urls(*both, begun=False) == urls(*both, together=True) == [alive, dead]
        assert urls(*gone) == [dead, dead], "none is there"
        assert urls(replace(up, wanted=False)) is None and urls() == []
        assert urls(replace(up, wanted=False), gone[1]) == [dead]
        assert urls(replace(up, turn=EngineTurn.AWAY)) is urls(replace(up, turn=EngineTurn.ASLEEP)) is None
    finally:
        server.shutdown()


def test_an_engine_that_is_left_out_is_waited_for_no_more() -> None:
    fleet = EngineFleet([f"http://127.0.0.1:{ports.choose('127.0.0.1', 1, None)[0]}"], "k", 1.0)
    with pytest.raises(EngineError, match="is no longer to be joined"):
        fleet.wait_ready(600.0, lambda: False, lambda: fleet.urls)


def test_an_engine_is_asked_once_it_has_weights_and_until_it_is_wanted_no_more() -> None:
    refusing, asked, second = {"b"}, list[str](), WeightsVersion(1, 2)

    def engine(name: str) -> web.Application:
        async def generate(request: web.Request) -> web.StreamResponse:
            asked.append(name)
            if name in refusing:
                return web.json_response({"error": "no weights"}, status=503)
            return await streaming(sample(0, 0))(request)

        app = web.Application()
        app.router.add_post("/megarl/generate", generate)
        return app

    async def scenario() -> None:
        async with TestServer(engine("a")) as first, TestServer(engine("b")) as other:
            a, b = (str(server.make_url("")).rstrip("/") for server in (first, other))
            one, none = serving_row(0, a, version=second), serving_row(1, b)
            two = having(none, second)
            async with EngineClient(EngineChoice([one]), "k") as client:

                async def ask(*rows: EngineRow, times: int = 3) -> set[str]:
                    client.engines.see(rows)
                    asked.clear()
                    for _ in range(times):
                        sampling = Sampling(max_tokens=1, oldest=second)
                        tasks = [client.generate([Prompt([1])], sampling) for _ in range(2)]
                        await asyncio.gather(*(anext(task) for task in tasks))
                        for task in tasks:
                            await task.aclose()
                    return set(asked)

                assert await ask(one, none) == {"a"}, "it has no weights yet"
                with pytest.raises(EngineClosed):  # those that it has are lost, which its row does not say
                    await ask(one, two, times=4)
                assert await ask(one, two) == {"a"}
                refusing.clear()
                assert await ask(one, having(replace(two, start=5), second)) == {"a", "b"}, "it is another start"
                assert await ask(one, replace(two, turn=EngineTurn.ASLEEP)) == {"a"}
                assert await ask(replace(one, wanted=False), having(replace(two, start=6), second)) == {"b"}
                with pytest.raises(EngineClosed, match="no engine may be asked with weights 1.2 or later"):
                    await ask(replace(one, wanted=False), none)

    asyncio.run(scenario())
