"""Evaluations while training goes on: whom engines are asked for, who gets newer weights, and what is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.core.config import Config
from megarl.core.config.job import SyncConfig
from megarl.core.config.rewards import JudgeConfig, RewardConfig
from megarl.core.config.schema import RolloutConfig, RunConfig, TrainerConfig
from megarl.core.errors import ConfigError, EngineClosed, EngineError, WeightsPassed
from megarl.core.jobs import JOBS
from megarl.core.schema import Task, WeightsVersion
from megarl.engine.client.client import EngineClient, Prompt, Sampling
from megarl.engine.client.frames import VersionSpan
from megarl.engine.client.reserved import ReservedEngines
from megarl.engine.fleet import EngineStatus, Fleet, WeightsAsked, refusal
from megarl.explore.explorer.engines import EngineFollower
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.explore.explorer.held_out import record_evaluations
from megarl.explore.explorer.under_way import SamplesUnderWay
from megarl.explore.store import Store
from megarl.explore.tasksets import ChatTokenizer
from megarl.run.checks.pacing import check_pacing
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Stopped
from megarl.train.rollout.awaited import Awaited
from megarl.train.rollout.evaluation import Evaluation
from megarl.train.rollout.meanwhile import EvaluationMeanwhile
from megarl.train.sync.publish import WeightPublisher
from tests.chat_battery import checkpoint
from tests.engine_rows import serving_row
from tests.unit.test_held_out import answered
from tests.unit.test_rollout_client import sample, streaming
from tests.unit.test_spare import Scorer

OLD, NEW = WeightsVersion(1, 2), WeightsVersion(1, 3)
FINE = Config(
    trainer=TrainerConfig(eval_engines=1, eval_interval=2),
    rollout=RolloutConfig(replicas=2),
    sync=SyncConfig(pause="keep", order="completion", max_staleness=1),
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sync": SyncConfig()}, r"trainer\.eval_engines=1 with sync\.pause=wait: .* set sync\.pause=keep"),
        ({"run": RunConfig(mode="train")}, r"trainer\.eval_engines=1 with run\.mode=train: .* set run\.mode=both"),
        (
            {"trainer": TrainerConfig(eval_engines=2, eval_interval=2)},
            r"eval_engines=2 with rollout\.replicas=2: .* set rollout\.replicas to 3 or more, or .* to 1 or less",
        ),
        ({"trainer": TrainerConfig(eval_engines=1)}, r"eval_engines=1 with trainer\.eval_interval=0"),
        (
            {"reward": RewardConfig(judge=JudgeConfig(url="rollout"))},
            r"eval_engines=1 with reward\.judge\.url=rollout: .* set the URL of another judge",
        ),
    ],
)
def test_what_cannot_keep_its_weights_is_refused(changed: dict[str, Any], message: str) -> None:
    check_pacing(FINE, JOBS["both"])
    with pytest.raises(ConfigError, match=message):
        check_pacing(replace(FINE, **changed), JOBS["both"])


class Servers:
    """Engines that answer with weights that a test sets where these are new enough, and count what they compute."""

    def __init__(self) -> None:
        self.versions: list[WeightsVersion] = [OLD, OLD]
        self.asked: list[int] = [0, 0]
        self.looks = 0
        self.refused: list[int] = [0, 0]
        self.urls: list[str] = []

    def handler(self, number: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            body, has = await request.json(), self.versions[number]
            asked = WeightsAsked(0, *(v and WeightsVersion.parse(v) for v in (body["oldest"], body.get("newest"))))
            if (reason := refusal(asked, 1, has)) is not None:
                self.refused[number] += 1
                return web.json_response({"error": reason, "version": str(has)}, status=409)
            self.asked[number] += 1
            return await streaming(sample(0, 0, versions=(VersionSpan(str(self.versions[number]), 0, 2),)))(request)

        return answer

    async def __aenter__(self) -> Servers:
        self._stack = AsyncExitStack()
        for number in range(2):
            app = web.Application()
            app.router.add_post("/megarl/generate", self.handler(number))
            server = await self._stack.enter_async_context(TestServer(app))
            self.urls.append(str(server.make_url("")).rstrip("/"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def has(self, engine: Any, least: WeightsVersion) -> bool:
        self.looks += 1
        return self.versions[self.urls.index(engine.url)] >= least


async def ask(client: EngineClient, sampling: Sampling) -> None:
    async for _ in client.generate([Prompt([1])], sampling):
        pass


def test_engines_of_an_evaluation_are_asked_for_nothing_else_until_they_have_newer_weights() -> None:
    training = Sampling(max_tokens=2, oldest=OLD)

    async def run() -> None:
        async with Servers() as servers, EngineClient(servers.urls, "k") as client:
            client._reserved = ReservedEngines("k", lambda: client.engines.urls, servers.has, every_s=0.01)
            evaluation = Sampling(max_tokens=2, oldest=OLD, newest=OLD, engines=servers.urls[1:])
            for _ in range(3):
                await ask(client, evaluation)
            assert servers.asked == [0, 3]
            servers.versions[0] = NEW
            for _ in range(4):
                await ask(client, training)
            looks = servers.looks
            while servers.looks < looks + 3:  # the evaluation has ended, and its engine has the weights still
                await asyncio.sleep(0.01)
            await ask(client, replace(training, oldest=NEW))
            assert servers.asked == [5, 3]
            servers.versions[1] = NEW
            while servers.urls[1] in client._reserved:
                await asyncio.sleep(0.01)
            client._outstanding[servers.urls[0]] = 1
            await ask(client, training)
            assert servers.asked == [5, 4]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_another_explorer_has_no_newer_group_computed_by_an_engine_that_keeps_its_weights() -> None:
    """It knows of no reservation. The engine refuses, and is asked again once it has what was asked for."""

    async def run() -> None:
        async with Servers() as servers, EngineClient(servers.urls, "k") as client:
            client.engines.followed = True
            servers.versions[0] = NEW
            training, urls = Sampling(max_tokens=2, oldest=NEW), servers.urls
            client._outstanding[urls[0]] = 9
            with pytest.raises(EngineClosed):
                await ask(client, training)
            for _ in range(4):
                await ask(client, training)
            assert servers.asked == [4, 0] and servers.refused == [0, 1]
            assert client.engines.closed == urls[1:] and client.engines.oldest == NEW

    asyncio.run(asyncio.wait_for(run(), 30))


def test_every_explorer_learns_which_engines_an_evaluation_has(tmp_path: Path) -> None:
    """Also one that did not claim its groups, or was started again. Training groups of earlier weights go elsewhere."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", TASKS)
    ids = store.tasks.ids("train")
    store.rollouts.request("eval-0", "eval", 0, OLD, ids, 2, {})
    assert store.evaluations.keepers() == {}

    async def call(function: Callable[[], Any]) -> Any:
        return function()

    async def run() -> None:
        async with Servers() as servers, EngineClient(servers.urls, "k") as client:
            client._reserved = ReservedEngines("k", lambda: client.engines.urls, servers.has, every_s=0.01)
            store.rollouts.request("eval-2", "eval", 2, OLD, ids, 2, {"engines": servers.urls[1:]})
            store.rollouts.request("eval-all", "eval", 2, OLD, ids, 2, {})
            keeping = asyncio.create_task(EngineFollower(store, client, "k", None).keep(call))
            while servers.urls[1] not in client._reserved:
                await asyncio.sleep(0.01)
            client._outstanding[servers.urls[0]] = 9
            for _ in range(3):
                await ask(client, Sampling(max_tokens=2, oldest=OLD))
            assert servers.asked == [3, 0] and servers.refused == [0, 0]
            keeping.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))
    store.evaluations.withdraw("eval-2")
    assert store.evaluations.keepers() == {}
    store.close()


def test_an_explorer_that_starts_amid_an_evaluation_asks_its_engines_for_no_training(tmp_path: Path) -> None:
    """Another explorer has claimed the evaluation. The new one knows its engines before it claims its first group."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(OLD.attempt)
    store.tasks.add("train", TASKS)
    ids, sampling = store.tasks.ids("train"), {"max_tokens": 4, "temperature": 1.0}
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))

    async def run() -> None:
        async with Servers() as servers, EngineClient(servers.urls, "k") as client:
            store.rollouts.request("eval-2", "eval", 2, OLD, ids[:1], 1, sampling | {"engines": servers.urls[1:]})
            assert [claim.kind for claim in store.groups.claim("another", 1)] == ["eval"]
            store.rollouts.request("train-2", "train", 2, OLD, ids, 1, sampling)
            client._outstanding[servers.urls[0]] = 9
            asked = AskedEngines(client, EngineFollower(store, client, "k", None))
            claims = ClaimSettings("new", capacity=1, poll_s=0.005)
            exploring = asyncio.create_task(Explorer(store, asked, Scorer(), tokenizer, claims).run())
            while not store.rollouts.is_complete("train-2"):
                assert not exploring.done(), exploring.result()
                await asyncio.sleep(0.01)
            store.journal.close_job()
            await exploring
            assert servers.asked == [len(ids), 0]

    asyncio.run(asyncio.wait_for(run(), 30))
    store.close()


def test_an_evaluation_has_no_answer_of_other_weights() -> None:
    async def run() -> None:
        async with Servers() as servers, EngineClient(servers.urls, "k") as client:
            evaluation = Sampling(max_tokens=2, oldest=OLD, newest=OLD, engines=servers.urls[1:])
            servers.versions[1] = NEW
            with pytest.raises(WeightsPassed, match=r"weights 1\.3 are newer than 1\.2"):
                await ask(client, evaluation)
            servers.versions[1] = WeightsVersion(1, 1)
            with pytest.raises(EngineError, match=r"weights 1\.1 are older than 1\.2"):
                await ask(client, evaluation)
            with pytest.raises(WeightsPassed, match=r"no engine at http://gone is left, which had weights 1\.2"):
                await ask(client, replace(evaluation, engines=["http://gone"]))
        assert servers.asked[0] == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_that_is_reserved_again_during_the_look_stays_reserved() -> None:
    """For the evaluation of the weights that the look has found there."""
    looking, go, looks = threading.Event(), threading.Event(), list[WeightsVersion]()

    def has_newer(engine: Any, least: WeightsVersion) -> bool:
        looks.append(least)
        looking.set()
        go.wait()
        return least <= NEW

    async def run() -> None:
        engines = ReservedEngines("k", lambda: ["http://e"], has_newer, every_s=0.01)
        engines.reserve(["http://e"], OLD)
        await asyncio.to_thread(looking.wait)
        engines.reserve(["http://e"], NEW)
        go.set()
        while len(looks) < 4:
            await asyncio.sleep(0.01)
        assert "http://e" in engines and engines._looking is not None and not engines._looking.done()
        await engines.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_look_that_fails_keeps_an_engine_reserved() -> None:
    """No server is there: the engine may be asked for nothing."""

    async def run() -> None:
        engines = ReservedEngines("k", lambda: ["http://127.0.0.1:1"], every_s=0.01)
        engines.reserve(["http://127.0.0.1:1"], OLD)
        await asyncio.sleep(0.2)
        assert "http://127.0.0.1:1" in engines and engines._looking is not None and not engines._looking.done()
        await engines.close()

    asyncio.run(run())


class Publishing:
    """Rank 0's choice of the engines that take a version, of a job with engines that serve."""

    def __init__(self, store: Store, number: int) -> None:
        self.store = store
        store.engines.register([serving_row(n, f"http://{n}") for n in range(number)])
        look: Any = SimpleNamespace(fleet=lambda: Fleet(store.engines.own()))
        self.connection: Any = SimpleNamespace(look=look, come_and_go=False, config=FINE)
        self.publisher = WeightPublisher(self.connection, store.engines)
        self.give(OLD)

    def give(self, version: WeightsVersion) -> list[int]:
        """Publish; return the numbers of the engines that took the version."""
        self.connection.rows = Fleet(self.store.engines.own()).to_join(begun=True)
        behind = self.publisher._behind(version)
        self.publisher._note(behind, version)
        return [self.connection.rows[place].number for place in behind]

    def replaced(self, number: int) -> None:
        """Another process is in the place of an engine's."""
        row = next(row for row in self.store.engines.own() if row.number == number)
        self.store.engines.note([replace(row, start=row.start + 10)])

    def hold(self, count: int, version: WeightsVersion, rollout: str = "eval") -> list[int]:
        engines = Fleet(self.store.engines.own()).to_hold(count, version)
        self.store.engines.hold([row.key for row in engines], rollout)
        return [row.number for row in engines]

    def holding(self) -> list[int]:
        return [row.number for row in self.store.engines.own() if row.holds_for]


def test_engines_that_keep_weights_get_no_newer_ones_while_they_have_theirs(tmp_path: Path) -> None:
    job = Publishing(Store(f"sqlite:///{tmp_path}/store.db"), 3)
    assert job.hold(1, OLD) == [0] and job.give(NEW) == [1, 2]
    job.store.engines.free()
    assert job.give(NEW) == [0]
    assert job.hold(7, NEW) == [0, 1], "one is left for training"
    job.replaced(0)
    assert job.give(NEW) == [0] and job.holding() == [], "the evaluation has lost an engine"
    assert job.hold(0, NEW) == []


def test_an_engine_whose_update_was_cut_off_keeps_nothing(tmp_path: Path) -> None:
    job = Publishing(Store(f"sqlite:///{tmp_path}/store.db"), 2)
    job.hold(1, OLD)
    job.publisher._note([0], None)
    assert job.holding() == [] and [row.has for row in job.store.engines.own()] == [None, OLD]


def test_an_evaluation_goes_on_when_fewer_engines_are_ordered(tmp_path: Path) -> None:
    """It has two of four for itself, and is given up when no other one is left."""
    job = Publishing(Store(f"sqlite:///{tmp_path}/store.db"), 4)
    assert job.hold(2, OLD) == [0, 1]
    job.store.engines.scale("train", 3)
    assert job.give(NEW) == [2] and job.holding() == [0, 1]
    job.store.engines.scale("train", 2)
    assert job.give(NEW) == [0, 1] and job.holding() == []


TASKS = [Task(f"t{i}", "sums", ({"role": "user", "content": str(i)},), "", {"ground_truth": "1"}) for i in range(3)]


class Job:
    """A trainer of one rank, and the groups that an explorer holds for it."""

    def __init__(self, path: Path) -> None:
        self.store = Store(f"sqlite:///{path}/store.db")
        self.store.tasks.add("eval", TASKS)
        self.written: list[tuple[int, dict[str, float]]] = []
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        context = RunContext(FINE, path, 1, 0)
        this: Any = self
        self.publishing = Publishing(self.store, 2)
        self.timeline = SimpleNamespace(phase=lambda name, **labels: nullcontext())
        evaluation = Evaluation(context, self.store, this, self.wait)
        self.meanwhile = EvaluationMeanwhile(context, self.store, this, this, evaluation, self.wait)

    def wait(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None:
        if not look().complete:
            raise Stopped

    def ends(self, step: int) -> bool:
        """Wait for the open evaluation; False where it has not ended."""
        try:
            self.meanwhile.wait(step)
        except Stopped:
            return False
        return True

    def agree(self, yes: bool) -> bool:
        return yes

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.written.append((step, metrics))

    def event(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append({"kind": kind, **data})

    def log(self, text: str) -> None:
        self.said.append(text)

    def evaluate(self) -> None:
        for claim in self.store.groups.claim("w", 100):
            assert claim.sampling["engines"] == ["http://0"]
            assert self.store.groups.put(claim, [answered(claim, 0, 1)])
        record_evaluations(self.store, "w")


def test_an_evaluation_is_reported_under_its_step_when_it_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.meanwhile.begin(2, OLD, "eval-2")
    assert job.publishing.holding() == [0] and job.store.evaluations.uncounted() == {"eval-2": 2}
    job.meanwhile.settle(3)
    assert not job.ends(3) and job.publishing.holding() and not job.written
    job.evaluate()
    job.meanwhile.settle(4)
    [(step, metrics)] = job.written
    assert (step, metrics["val/accuracy"], metrics["val/steps_meanwhile"]) == (2, 1.0, 2.0)
    assert not job.publishing.holding() and not job.meanwhile.due and job.ends(4)


def test_an_evaluation_whose_engine_dies_is_made_with_later_weights(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.meanwhile.begin(2, OLD, "eval-2")
    [held, *_] = job.store.groups.claim("w", 1)
    job.publishing.replaced(0)
    assert job.publishing.give(NEW) == [0, 1]
    job.meanwhile.settle(3)
    assert job.store.evaluations.uncounted() == {} and not job.store.groups.put(held, [answered(held, 0, 1)])
    assert job.events == [{"kind": "evaluation_lost", "step": 2, "rollout_id": "eval-2"}]
    assert "evaluation of step 2 is given up" in job.said[0]
    assert job.meanwhile.due and not job.written
    assert job.meanwhile.begin(3, NEW, "eval-3") and not job.meanwhile.due
    job.evaluate()
    assert job.ends(3) and [step for step, _ in job.written] == [3]


def test_an_evaluation_whose_engine_is_scaled_away_is_given_up_without_a_publication(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.meanwhile.begin(2, OLD, "eval-2") and not job.ends(3)
    row = job.store.engines.own()[0]
    job.store.engines.note([replace(row, state=EngineStatus.ABSENT)])
    assert job.ends(3) and job.meanwhile.due and not job.written
    assert job.store.evaluations.uncounted() == {} and [event["kind"] for event in job.events] == ["evaluation_lost"]


def test_an_evaluation_that_has_ended_is_not_given_up(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.meanwhile.begin(2, OLD, "eval-2")
    job.evaluate()
    job.publishing.replaced(0)
    assert job.publishing.give(NEW) == [0, 1]
    job.meanwhile.settle(3)
    assert [step for step, _ in job.written] == [2] and not job.meanwhile.due and not job.events


@pytest.mark.parametrize(("back_to", "due"), [(4, True), (2, False), (0, False)])
def test_an_evaluation_is_made_again_after_a_rollback(back_to: int, due: bool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.meanwhile.begin(2, OLD, "eval-2")
    job.store.rollouts.discard(back_to, ahead=True)
    assert not job.store.evaluations.uncounted() and job.store.groups.claim("w", 9) == []
    job.meanwhile.forget(back_to)
    assert job.meanwhile.due is due and not job.publishing.holding()


def test_samples_of_such_an_evaluation_take_no_place_of_others(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", TASKS)
    ids = store.tasks.ids("train")
    store.rollouts.request("train-000000", "train", 0, OLD, ids, 2, {})
    store.rollouts.request("eval-0", "eval", 0, OLD, ids, 2, {"engines": ["http://1"]})
    under_way = SamplesUnderWay(4)
    claims = store.groups.claim("w", 9, max_samples=under_way.free)
    assert [claim.kind for claim in claims] == ["eval", "eval"]
    under_way.begin(claims)
    assert (under_way.free, under_way.total, under_way.evaluates) == (4, 4, False)
    others = store.groups.claim("w", 9, max_samples=under_way.free, evaluations=under_way.evaluates)
    assert [claim.kind for claim in others] == ["train", "train"]
    under_way.begin(others)
    assert (under_way.free, under_way.total) == (0, 8)
    under_way.end(claims[0])
    under_way.end(others[0])
    assert (under_way.free, under_way.total, under_way.evaluates) == (1, 6, True)
    with under_way.until_passed(claims):
        raise ExceptionGroup("calls", [WeightsPassed("newer")])
    assert (under_way.free, under_way.total) == (1, 3)
    assert [claim.kind for claim in store.groups.claim("w", 9, evaluations=False)] == ["train"]
    assert store.groups.claim("w", 9, evaluations=False) == []
    assert [claim.kind for claim in store.groups.claim("w", 9)] == ["eval"]
    store.close()
