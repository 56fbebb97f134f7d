"""Teachers at URLs: a small real server on loopback that replies well and badly, and what is made of its replies."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import load as load_tensors

from megarl.buffer.store import OutlineRow, is_outline, with_arrays
from megarl.buffer.store.codec import outline_from_row, trajectory_from_row, trajectory_to_row
from megarl.config import compose
from megarl.config.schema import TeacherConfig
from megarl.core.errors import ConfigError, DataError, JobError
from megarl.core.schema import TEACHER, End, Reward, Trajectory, Turn, WeightsSpan
from megarl.learn.batching import of_samples
from megarl.rewards import model_server
from megarl.rewards.teacher_server import TeacherServers, check_teacher_servers
from megarl.run.launch.joining import differences
from megarl.run.run_dir.changes import Change
from megarl.train.rollout.reading import nbytes_of
from tests.trajectories import VERSION, one_turn
from tests.unit.small_job import config_of, refused

KEY = "sk-teacher"
LIKELY = 90
"""Token that this teacher likes best at every place, then the next one."""
Change_ = Callable[[dict[str, Any]], None]


def logp_of(before: Sequence[int], token: int) -> float:
    """Depends on the whole context, so that a wrong one shows."""
    return -1.0 - (sum(before) % 97) / 100 - token / 1000


@dataclass
class Server:
    """vLLM's answers; ``change`` spoils the answer of a request by its number."""

    change: Callable[[int, dict[str, Any]], Any] = lambda number, answer: None
    length: int | None = 32
    texts: Callable[[int], str] = chr
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        ids, k = body["prompt"], body["prompt_logprobs"]
        places: list[Any] = [None]
        for place in range(1, len(ids)):
            found = {str(ids[place]): {"logprob": logp_of(ids[:place], ids[place]), "rank": 50}}
            found |= {str(LIKELY + i): {"logprob": -0.1 * (i + 1), "rank": i + 1} for i in range(k)}
            places.append(found)
        answer = {"model": body["model"], "choices": [{"prompt_logprobs": places}]}
        given = self.change(len(self.bodies), answer)
        if isinstance(given, int):
            return web.Response(status=given, text="no")
        if given is not None:
            await asyncio.sleep(given)
        return web.Response(text=json.dumps(answer), content_type="application/json")

    async def detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": "".join(map(self.texts, tokens))})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "large", "max_model_len": self.length}, {"id": "small"}]})

    def app(self, detokenizes: bool = True) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        if detokenizes:
            app.router.add_post("/detokenize", self.detokenize)
        return app


def model_turn(ids: Sequence[int], follows: int) -> Turn:
    logp, span = np.full(len(ids), -0.5, np.float32), WeightsSpan(0, len(ids), VERSION)
    return Turn("model", np.array(ids, np.int32), follows, logp, (span,), "stop")


def trajectory(turns: Sequence[Turn] = one_turn([1, 2, 3], [4, 5])) -> Trajectory:
    return Trajectory("train-000000", "t", "g", 0, 1, tuple(turns), Reward(1.0, "ok"), metadata={"note": "x"})


def two_lines() -> Trajectory:
    """A first line with a tool's text between two turns of the model, and a second line."""
    prompt, tool, other = (np.array(ids, np.int32) for ids in ([1, 2], [7, 7, 7], [8, 9, 10]))
    turns = [Turn("user", prompt), model_turn([3, 4], 0), Turn("tool", tool, 1), model_turn([5], 2)]
    return trajectory([*turns, Turn("user", other), model_turn([6, 11], 4)])


def taught(server: Server, trajectories: Sequence[Trajectory], top_k: int = 0, **settings: Any) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        async with TestServer(server.app()) as running:
            config = TeacherConfig(**{"url": str(running.make_url("/v1")), "retries": 0, **settings})
            teachers = {"large": config, "near": TeacherConfig("/m", sources=["near"])}
            async with TeacherServers(teachers, top_k, LIKELY + 1) as subject:
                return [await subject.taught(each, "far") for each in trajectories]

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "BACKOFF_S", 0.001)
    monkeypatch.setenv("MEGARL_TEACHER_KEY_large", KEY)
    monkeypatch.setenv("MEGARL_TEACHER_KEY", "another")


def test_one_request_scores_a_line() -> None:
    server = Server()
    [found] = taught(server, [trajectory()])
    [body] = server.bodies
    assert body["prompt"] == [1, 2, 3, 4, 5] and body["model"] == "large"
    assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0) and server.keys == {f"Bearer {KEY}"}
    scores = found.teacher_scores
    assert scores is not None and scores.teacher == found.metadata[TEACHER] == "large" and scores.ids.shape == (2, 0)
    assert scores.logp == pytest.approx([logp_of([1, 2, 3], 4), logp_of([1, 2, 3, 4], 5)])
    assert found.metadata["note"] == "x" and found.end is End.FINISHED


def test_each_token_in_its_own_context_through_the_store() -> None:
    [found] = taught(Server(), [two_lines()], top_k=2)
    row = trajectory_to_row(found)
    outline = outline_from_row(OutlineRow(**{name: value for name, value in row.items() if name != "tensors"}))
    assert is_outline(outline) and nbytes_of(outline) == nbytes_of(found)
    found = with_arrays(outline, load_tensors(row["tensors"]))
    assert trajectory_to_row(found) == row == trajectory_to_row(trajectory_from_row(SimpleNamespace(**row)))
    scores = found.teacher_scores
    assert scores is not None and scores.logp.dtype == scores.logps.dtype == np.float32 and scores.ids.dtype == np.int32
    wanted = [([1, 2], 3), ([1, 2, 3], 4), ([1, 2, 3, 4, 7, 7, 7], 5), ([8, 9, 10], 6), ([8, 9, 10, 6], 11)]
    assert scores.logp == pytest.approx([logp_of(before, token) for before, token in wanted])
    assert scores.ids.tolist() == [[LIKELY, LIKELY + 1]] * 5 and scores.logps == pytest.approx(
        np.tile([-0.1, -0.2], (5, 1))
    )
    samples = list(found.samples())
    first = samples[0].teacher
    assert first is not None and first.logp == pytest.approx([*scores.logp[:2], 0, 0, 0, scores.logp[2]])
    assert first.ids[2:5].tolist() == [[0, 0]] * 3 and first.top_k == 2
    sequences = of_samples([samples[1], samples[0]])
    assert sequences.teacher_logp is not None
    assert sequences.teacher_logp.tolist() == pytest.approx([0, 0, *scores.logp[3:], 0, 0, *first.logp, 0])
    assert trajectory_from_row(SimpleNamespace(**trajectory_to_row(two_lines()))).teacher_scores is None


def test_shared_turns_are_scored_once() -> None:
    """Two lines share the first turn of the model; only the first trains it."""
    turns = [*one_turn([1, 2], [3]), Turn("user", np.array([7], np.int32), 1), model_turn([4], 2)]
    branched = trajectory([*turns, Turn("user", np.array([8], np.int32), 1), model_turn([5], 4)])
    [found] = taught(Server(), [branched])
    assert found.teacher_scores is not None
    assert found.teacher_scores.logp == pytest.approx(
        [logp_of([1, 2], 3), logp_of([1, 2, 3, 7], 4), logp_of([1, 2, 3, 8], 5)]
    )
    second = list(found.samples())[1].teacher
    assert second is not None and second.logp == pytest.approx([logp_of([1, 2, 3, 8], 5)])


def places(answer: dict[str, Any]) -> list[Any]:
    found: list[Any] = answer["choices"][0]["prompt_logprobs"]
    return found


def with_logp(value: float) -> Change_:
    return lambda answer: places(answer)[-1]["5"].update(logprob=value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda answer: answer.update(model="other"), "it is of the model 'other', not 'large'"),
        (lambda answer: places(answer).pop(), "it has 4 prompt_logprobs for 5 tokens"),
        (lambda answer: answer["choices"][0].pop("prompt_logprobs"), "it has no prompt_logprobs for 5 tokens"),
        (lambda answer: places(answer).__setitem__(3, None), "place 3 has no log-prob of token 4"),
        (lambda answer: places(answer)[4].pop("5"), "place 4 has no log-prob of token 5"),
        (with_logp(math.nan), "nan of token 5 at place 4 is no log-prob"),
        (with_logp(-math.inf), "-inf of token 5"),
        (with_logp(-9999.0), "-9999 of token 5"),
        (with_logp(0.5), "0.5 of token 5"),
        (lambda answer: places(answer)[4].pop("91"), "place 4 has not the 2 likeliest tokens"),
        (lambda answer: places(answer)[4].update({"92": places(answer)[4].pop("91")}), "92 at place 4 is not in"),
        (lambda answer: answer.pop("choices"), "answered what is no reply"),
        (lambda answer: 400, "answered 400: no"),
    ],
)  # fmt: skip
def test_a_bad_reply_is_the_trajectorys_failure(spoil: Callable[[dict[str, Any]], Any], words: str) -> None:
    def change(number: int, answer: dict[str, Any]) -> Any:
        given = spoil(answer)
        return given if isinstance(given, int) else None

    [found] = taught(Server(change), [trajectory()], top_k=2)
    assert found.end is End.TEACHER_ERROR and found.reward.status == "error" and math.isnan(found.reward.score)
    assert found.teacher_scores is None and words in found.metadata["reward_message"]


def test_a_slow_teacher_and_retries() -> None:
    slow = Server(lambda number, answer: 0.5)
    [found] = taught(slow, [trajectory()], timeout_s=0.1)
    assert found.end is End.TEACHER_TIMEOUT and "no answer within 0.1 s" in found.metadata["reward_message"]
    failing = Server(lambda number, answer: 500 if number < 3 else None)
    [found] = taught(failing, [trajectory()], retries=2)
    assert found.teacher_scores is not None and len(failing.bodies) == 3


def test_failures_in_a_row_end_the_job() -> None:
    every_third = Server(lambda number, answer: None if number % 3 == 0 else 400)
    assert len(taught(every_third, [trajectory()] * 9, max_failures=3)) == 9
    with pytest.raises(JobError, match=r"3 trajectories in a row .*teachers\.large\.max_failures=3.* answered 400"):
        taught(Server(lambda number, answer: 400), [trajectory()] * 9, max_failures=3)


def test_failures_are_a_line_for_the_terminal() -> None:
    async def main() -> str | None:
        async with TestServer(Server(lambda number, answer: 400 if number == 2 else None).app()) as running:
            config = TeacherConfig(url=str(running.make_url("/v1")))
            async with TeacherServers({"large": config}) as subject:
                for _ in range(3):
                    await subject.taught(trajectory(), "far")
                return subject.tally.line()

    line = asyncio.run(main())
    assert line is not None and line.startswith(
        "teachers: 1 of the last 3 scores failed (error 1); newest: the teacher l"
    )


def test_a_dead_teacher_is_waited_for_then_ends_the_job() -> None:
    returns = Server(lambda number, answer: 503 if number < 8 else None)
    [found] = taught(returns, [trajectory()], outage_s=60.0)
    assert found.teacher_scores is not None
    with pytest.raises(JobError, match=r"answered 503.*teachers\.large\.outage_s=0\.1; start the teacher's server"):
        taught(Server(lambda number, answer: 503), [trajectory()], outage_s=0.1)


def test_teachers_with_a_path_are_named_only() -> None:
    async def main(source: str) -> Trajectory:
        async with TeacherServers({"near": TeacherConfig("/m", sources=["near"])}) as subject:
            return await subject.taught(trajectory(), source)

    assert asyncio.run(main("near")).metadata[TEACHER] == "near" and asyncio.run(main("near")).teacher_scores is None
    assert TEACHER not in asyncio.run(main("other")).metadata


def test_a_teacher_of_weight_0_is_not_asked() -> None:
    server = Server()
    [found] = taught(server, [trajectory()], weight=0.0)
    assert found.teacher_scores is None and not server.bodies


def checked(
    server: Server, detokenizes: bool = True, context: int = 31, own: Callable[[int], str] = chr, **settings: Any
) -> list[str]:
    """In threads, because the check has an event loop of its own."""

    async def main() -> list[str]:
        async with TestServer(server.app(detokenizes)) as running:
            config = TeacherConfig(**{"url": str(running.make_url("/v1")), **settings})
            work: Awaitable[list[str]] = asyncio.to_thread(
                check_teacher_servers, {"large": config}, range(300), lambda ids: "".join(map(own, ids)), context
            )
            return await work

    return asyncio.run(main())


def test_checks_before_the_start() -> None:
    assert checked(Server()) == [] and checked(Server(length=None), model="small", context=10**6) == []
    other: Callable[[int], str] = lambda token: "?" if token in (200, 201) else chr(token)  # noqa: E731
    for server, settings, words in (
        (Server(), {"model": "huge"}, r"teachers\.large\.model='huge' is not at .*which has \['large', 'small'\]"),
        (Server(), {"context": 32}, r"max_model_len=32; it needs 33"),
        (Server(texts=other), {}, r"token 200 is '\?' there, and 'È' in the student's tokenizer"),
        (
            Server(lambda n, answer: answer["choices"][0].pop("prompt_logprobs") and None),
            {},
            r"it must be vLLM's server",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            checked(server, **{"retries": 0, **settings})
    [warning] = checked(Server(), detokenizes=False)
    assert "has no /detokenize" in warning


def test_texts_that_differ_in_spaces_alone() -> None:
    """As where the server's tokenizer removes spaces before punctuation, or adds some between tokens."""

    class Spaced(Server):
        async def detokenize(self, request: web.Request) -> web.Response:
            text = "".join(map(spaced, (await request.json())["tokens"]))
            return web.json_response({"prompt": text.replace("AB", "A B").replace(" .", ".")})

    def spaced(token: int) -> str:
        return {200: " ."}.get(token, chr(token))

    assert checked(Spaced(), own=spaced) == []


def test_settings_of_a_url(prepared: Path, tmp_path: Path) -> None:
    url = "teachers.large.url=http://127.0.0.1:9/v1"
    distill = ["algorithm=distill", "algorithm.kl.coef=0"]
    with pytest.raises(ConfigError, match=r"teachers\.large has both of path and url"):
        compose(["experiment=quickstart", f"run.dir={tmp_path}", "algorithm=distill", url, "teachers.large.path=/m"])
    for more, words in (
        ("rollout.temperature=0.7", "at temperature 1"),
        ("teachers.large.dtype=float32", "the server decides"),
        ("teachers.large.offload=memory", "the server decides"),
        ("algorithm.divergence=jsd", "a server returns no whole distributions; set algorithm.top_k"),
        ("teachers.large.retries=0", "cannot be reached"),
    ):
        refused(ConfigError, config_of(prepared, *distill, url, more), words)
    refused(ConfigError, config_of(prepared, *distill, "teachers.large.url=127.0.0.1:9"), "is no base URL")
    assert not Change("teachers.large.url", "http://a/v1", "http://b/v1").trains()
    assert (
        Change("teachers.large.url", None, "http://b/v1").trains() and Change("teachers.large.model", "a", "b").trains()
    )
    assert not Change("teachers.large.concurrency", 1, 2).trains()
    with_url, without = (config_of(prepared, *distill, *given) for given in ([url], ["teachers.large.path=/m"]))
    assert {change.setting for change in differences(with_url, without)} == {
        "teachers.large.url",
        "teachers.large.path",
    }


def test_images_are_not_sent(prepared: Path) -> None:
    from megarl.run.checks.distillation import check_taught
    from tests.stores import make_task

    config = config_of(prepared, "algorithm=distill", "teachers.large.url=http://127.0.0.1:9/v1")
    check_taught(config, [make_task(0)])
    with pytest.raises(DataError, match=r"has images, which teachers\.large\.url is not sent"):
        check_taught(config, [replace(make_task(0), images=(b"x",))])
    shown = replace(one_turn([1, 2], [3])[0], images=("digest",))
    [found] = taught(Server(), [trajectory([shown, one_turn([1, 2], [3])[1]])])
    assert found.end is End.TEACHER_ERROR and "is not sent images" in found.metadata["reward_message"]
