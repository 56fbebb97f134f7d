"""Evaluations while training goes on: whom engines are asked for, who gets newer weights, and what is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.job import SyncConfig
from megarl.config.rewards import JudgeConfig, RewardConfig
from megarl.config.schema import RolloutConfig, RunConfig, TrainerConfig
from megarl.core.errors import ConfigError, EngineClosed, WeightsPassed
from megarl.core.jobs import JOBS
from megarl.core.schema import Task, WeightsVersion
from megarl.engines.client import engine_choice
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.client.frames import VersionSpan
from megarl.engines.fleet import EngineStatus, Fleet, WeightsAsked, refusal
from megarl.explore.explorer.claimed import SamplesUnderWay
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.explore.explorer.other_explorers import record_evaluations
from megarl.run.checks.pacing import check_pacing
from megarl.tasks import ChatTokenizer
from megarl.train.ranks import RunContext, Stopped
from megarl.train.rollout.evaluation import Evaluation, EvaluationMeanwhile
from megarl.train.rollout.group_part import Awaited
from megarl.train.sync.publish import WeightPublisher
from tests.chat_battery import checkpoint
from tests.engine_rows import having, serving_row
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
    """Two engines, which refuse what does not fit them as the engine's gate does, and count what they compute.
    ``sampled``: weights of the samples, where a weight update comes between gate and sample."""

    def __init__(self) -> None:
        self.rows = [serving_row(number, "", version=OLD) for number in range(2)]
        self.sampled: WeightsVersion | None = None
        self.asked: list[int] = [0, 0]
        self.refused: list[int] = [0, 0]

    def handler(self, number: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            body, row = await request.json(), self.rows[number]
            bounds = (v and WeightsVersion.parse(v) for v in (body.get("oldest"), body.get("newest")))
            if (reason := refusal(WeightsAsked(body["start"], *bounds), row.start, row.weights[0].version)) is not None:
                self.refused[number] += 1
                return web.json_response({"error": reason}, status=409)
            self.asked[number] += 1
            return await streaming(
                sample(0, 0, versions=(VersionSpan(str(self.sampled or row.weights[0].version), 0, 2),))
            )(request)

        return answer

    async def __aenter__(self) -> Servers:
        self._stack = AsyncExitStack()
        for number in range(2):
            app = web.Application()
            app.router.add_post("/megarl/generate", self.handler(number))
            server = await self._stack.enter_async_context(TestServer(app))
            self.change(number, url=str(server.make_url("")).rstrip("/"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def change(self, number: int, **columns: Any) -> None:
        """Change columns; ``version``: weights that are proven by the start, or by ``proven_by``."""
        version, start = columns.pop("version", None), columns.pop("proven_by", None)
        self.rows[number] = replace(self.rows[number], **columns)
        if version is not None:
            self.rows[number] = having(self.rows[number], version, start)

    def choice(self) -> EngineChoice:
        """An explorer's, with the rows of now. The first engine is busier."""
        found = EngineChoice(list(self.rows))
        found.outstanding[self.rows[0].url] = 9
        return found


async def ask(client: EngineClient, sampling: Sampling, times: int = 1) -> None:
    for _ in range(times):
        async for _ in client.generate([Prompt([1])], sampling):
            pass


def waited(scenario: Callable[[Servers], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Servers() as servers:
            await scenario(servers)

    asyncio.run(asyncio.wait_for(run(), 30))


TRAINING = Sampling(max_tokens=2, oldest=OLD)
EVALUATION = Sampling(max_tokens=2, oldest=OLD, newest=OLD, rollout="eval")


def test_engines_of_an_evaluation_are_asked_for_nothing_else_by_any_explorer() -> None:
    async def run(servers: Servers) -> None:
        servers.change(0, version=NEW)
        servers.change(1, holds_for="eval")
        async with EngineClient(servers.choice(), "k") as first, EngineClient(servers.choice(), "k") as second:
            for explorer in (first, second):
                await ask(explorer, EVALUATION, 3)
                await ask(explorer, TRAINING, 4)
                await ask(explorer, replace(EVALUATION, newest=None, rollout=""), 1)
            assert (servers.asked, servers.refused) == ([10, 6], [0, 0])
            servers.change(1, holds_for="")
            second.engines.see(servers.rows)
            await ask(second, TRAINING)
            assert servers.asked == [10, 7]

    waited(run)


def test_an_engine_that_a_sync_has_left_out_is_asked_for_nothing_newer() -> None:
    async def run(servers: Servers) -> None:
        servers.change(0, version=NEW)
        async with EngineClient(servers.choice(), "k") as client:
            await ask(client, replace(TRAINING, oldest=NEW), 20)
            assert (servers.asked, servers.refused) == ([20, 0], [0, 0])
            await ask(client, TRAINING)
            assert servers.asked == [20, 1], "it has what is asked for"

    waited(run)


@pytest.mark.parametrize("changed", [{"start": 7}, {"version": OLD}])
def test_an_engine_that_is_not_what_its_row_says_computes_nothing(changed: dict[str, Any]) -> None:
    """It was started again, or the row has another engine's weights. Others are asked until its row has changed."""

    async def run(servers: Servers) -> None:
        for number in range(2):
            servers.change(number, version=NEW)
        async with EngineClient(servers.choice(), "k") as client:
            servers.change(1, **changed)
            training = replace(TRAINING, oldest=NEW)
            with pytest.raises(EngineClosed, match="start 7|older than 1.3"):
                await ask(client, training)
            await ask(client, training, 4)
            assert (servers.asked, servers.refused) == ([4, 0], [0, 1])
            servers.change(1, version=NEW, proven_by=servers.rows[1].start, workers=2)
            client.engines.see(servers.rows)
            await ask(client, training)
            assert servers.asked == [4, 1]

    waited(run)


def test_an_evaluation_has_no_answer_of_other_weights() -> None:
    async def run(servers: Servers) -> None:
        servers.change(1, holds_for="eval")
        async with EngineClient(servers.choice(), "k") as client:
            servers.sampled = NEW
            with pytest.raises(WeightsPassed, match=r"samples with weights 1\.3, which are newer than 1\.2"):
                await ask(client, EVALUATION)
            servers.change(1, version=NEW)
            with pytest.raises(EngineClosed, match=r"weights 1\.3 are newer than 1\.2"):
                await ask(client, EVALUATION)
            for columns in ({}, {"start": 7}, {"version": OLD, "holds_for": ""}):
                servers.change(1, **columns)
                client.engines.see(servers.rows)
                with pytest.raises(WeightsPassed, match=r"no engine has weights 1\.2 any more"):
                    await ask(client, EVALUATION)
        assert servers.asked[0] == 0

    waited(run)


def test_an_evaluation_of_all_engines_waits_for_one_that_starts_and_ends_where_one_has_newer_weights() -> None:
    async def run(servers: Servers) -> None:
        everywhere = replace(EVALUATION, rollout="")
        for number in range(2):
            servers.change(number, start=7)
        async with EngineClient(servers.choice(), "k") as client:
            with pytest.raises(EngineClosed, match=r"weights 1\.2 or later: engine 0 is serving and has no weights"):
                await ask(client, everywhere)
            servers.change(0, version=NEW, proven_by=7)
            client.engines.see(servers.rows)
            with pytest.raises(WeightsPassed):
                await ask(client, everywhere)
            servers.change(1, version=OLD, proven_by=7)
            client.engines.see(servers.rows)
            await ask(client, everywhere)
        assert (servers.asked, servers.refused) == ([0, 1], [0, 0])

    waited(run)


def test_an_explorer_reads_with_its_claims_which_engines_may_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no look, after a publication or amid an evaluation, whoever has claimed that. So does one that is
    started again."""
    monkeypatch.setattr(engine_choice, "EVERY_S", 3600.0)
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(OLD.attempt)
    store.tasks.add("train", TASKS)
    ids, sampling = store.tasks.ids("train"), {"max_tokens": 4, "temperature": 1.0}
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))

    async def run(servers: Servers) -> None:
        store.engines.register(servers.rows)

        async def explored(rollout: str, version: WeightsVersion, kind: Any, engine: int) -> None:
            store.rollouts.request(rollout, kind, 2, version, ids, 1, sampling)
            before = list(servers.asked)
            while not store.rollouts.is_complete(rollout):
                assert not exploring.done(), exploring.result()
                await asyncio.sleep(0.01)
            before[engine] += len(ids)
            assert (servers.asked, servers.refused) == (before, [0, 0])

        for again in range(2):
            async with EngineClient(servers.choice(), "k") as client:
                asked = AskedEngines(client, client.engines)
                claims = ClaimSettings("new", capacity=1, poll_s=0.005)
                exploring = asyncio.create_task(Explorer(store, asked, Scorer(), tokenizer, claims).run())
                if not again:
                    await explored("train-2", OLD, "train", 1)
                    store.engines.hold([("train", 1)], "eval-2")
                    await explored("eval-2", OLD, "eval", 1)
                    await explored("train-3", OLD, "train", 0)
                    servers.change(0, version=NEW)
                    store.engines.delivered({("train", 0): 1}, NEW)
                await explored(f"train-4{again}", NEW, "train", 0)
                exploring.cancel()
                await asyncio.gather(exploring, return_exceptions=True)

    waited(run)
    store.close()


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
        behind = self.publisher.behind(version)
        self.publisher.note(behind, version)
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
    job.publisher.note([0], None)
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
            assert self.publishing.holding() == [0]
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
    store.rollouts.request("eval-0", "eval", 0, OLD, ids, 2, {})
    under_way = SamplesUnderWay(4)
    claims = store.groups.claim("w", 9, max_samples=under_way.free)
    assert [claim.kind for claim in claims] == ["eval", "eval"]
    under_way.begin(claims, ["eval-0"])
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
