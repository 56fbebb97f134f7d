"""Teachers at URLs: vLLM's OpenAI server returns the log-probs of a trajectory's tokens (docs/distillation.md).

They mostly wait: ``TeacherServers`` runs in the explorer's event loop, as the judge does.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from megarl.config.derived import teacher_of, teacher_role
from megarl.config.schema import TeacherConfig
from megarl.core.errors import ConfigError, JobError
from megarl.core.schema import TEACHER, End, Reward, TeacherScores, Trajectory
from megarl.rewards.model_server import ModelServer, RequestFailed, check_url
from megarl.rewards.pool.tally import Tally

KEY_VARIABLE = "MEGARL_TEACHER_KEY"
"""Environment variable with the key of every teacher's server; ``<this>_NAME`` for the teacher NAME alone."""
LARGEST_LOGP = 1e-3
"""Largest log-prob that counts as a rounding error above 0."""
CLAMPED_LOGP = -9999.0
"""vLLM's replacement of a log-prob of minus infinity."""
PROBED = 4096
"""Token ids whose texts are requested at once."""
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts whose outer spaces some tokenizers remove when they decode (``clean_up_tokenization_spaces``)."""


class ScoredLine(NamedTuple):
    """Token ids of one context, and the tokens of the model in it that its last tokens need."""

    ids: np.ndarray
    """int32 [n]"""
    turns: dict[int, tuple[int, int]]
    """Number of a turn to score -> its first token and its end in ``ids``."""


class TeacherServer:
    """The server of one teacher.

    Args:
        top_k: Number of the teacher's likeliest tokens to request at each place, with their log-probs.
        largest_id: Largest token id of the student's tokenizer.
    """

    def __init__(self, name: str, config: TeacherConfig, top_k: int = 0, largest_id: int = 2**31 - 1) -> None:
        assert config.url is not None, "a teacher with a path is computed by the trainer"
        self.name, self._config, self._top_k, self._largest_id = name, config, top_k, largest_id
        url, setting = config.url.rstrip("/"), teacher_role(name)
        key = os.environ.get(f"{KEY_VARIABLE}_{name}") or os.environ.get(KEY_VARIABLE) or None
        self.server = ModelServer(
            f"the teacher {name}", setting, f"{KEY_VARIABLE}_{name}", lambda: [url], key, config, config.outage_s
        )
        self.model = config.model or ""
        """Name of its model at the server; set by ``open`` unless the settings name it."""
        self.failures = 0
        """Trajectories in a row without scores."""

    async def open(self) -> None:
        """Open the connections. Raises ConfigError if the settings name no model and the server lists none."""
        self.server.open()
        if not self.model:
            self.model = next(iter(await self.server.models()))

    async def scores(self, ids: np.ndarray, wanted: Sequence[int]) -> TeacherScores:
        """Return the scores of the tokens at the places ``wanted`` of a sequence, each at least 1.

        The server computes the whole sequence as a prompt and samples one more token, its fewest.

        Raises RequestFailed: the server is unreachable or refuses the request, or its reply is for another model, or
        lacks a place, or has no valid log-prob there.
        """
        body = {"model": self.model, "prompt": ids.tolist(), "max_tokens": 1, "prompt_logprobs": self._top_k}
        return await self.server.request("POST", "/completions", body, lambda answer: self._read(answer, ids, wanted))

    async def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens by the server's tokenizer. Raises RequestFailed."""
        body = {"model": self.model, "tokens": list(ids)}
        return await self.server.request("POST", "/../detokenize", body, lambda answer: str(answer["prompt"]))

    def _read(self, answer: Any, ids: np.ndarray, wanted: Sequence[int]) -> TeacherScores:
        if answer.get("model") != self.model:
            raise self._invalid(f"it is of the model {answer.get('model')!r}, not {self.model!r}")
        places = answer["choices"][0].get("prompt_logprobs")
        if not isinstance(places, list) or len(places) != len(ids):
            given = len(places) if isinstance(places, list) else "no"
            raise self._invalid(f"it has {given} prompt_logprobs for {len(ids)} tokens")
        logp, top = np.empty(len(wanted), np.float32), np.empty((len(wanted), self._top_k), np.float32)
        top_ids = np.empty((len(wanted), self._top_k), np.int32)
        for row, place in enumerate(wanted):
            token, found = int(ids[place]), places[place]
            if not found or str(token) not in found:
                raise self._invalid(f"place {place} has no log-prob of token {token}")
            logp[row] = self._valid(found[str(token)]["logprob"], place, token)
            ranked = sorted((int(each["rank"]), int(key)) for key, each in found.items())[: self._top_k]
            if [rank for rank, _ in ranked] != list(range(1, self._top_k + 1)):
                raise self._invalid(f"place {place} has not the {self._top_k} likeliest tokens")
            for column, (_, key) in enumerate(ranked):
                if key > self._largest_id:
                    raise self._invalid(f"token {key} at place {place} is not in the student's tokenizer")
                top_ids[row, column] = key
                top[row, column] = self._valid(found[str(key)]["logprob"], place, key)
        return TeacherScores(self.name, logp, top_ids, top)

    def _valid(self, value: Any, place: int, token: int) -> float:
        logp = float(value)
        if not math.isfinite(logp) or logp > LARGEST_LOGP or logp <= CLAMPED_LOGP:
            raise self._invalid(f"{logp:g} of token {token} at place {place} is no log-prob")
        return logp

    def _invalid(self, why: str) -> RequestFailed:
        return RequestFailed(f"the teacher {self.name} at {self._config.url} gave an unusable reply: {why}")


class TeacherServers:
    """The teachers of a job, as the explorer sees them: it asks those at URLs. Use as an async context manager.

    Raises ConfigError on entering if a server does not name its model.
    """

    def __init__(self, teachers: Mapping[str, TeacherConfig], top_k: int = 0, largest_id: int = 2**31 - 1) -> None:
        self._teachers = teachers
        urls = {name: config for name, config in teachers.items() if config.url is not None and config.weight}
        self._servers = {name: TeacherServer(name, config, top_k, largest_id) for name, config in urls.items()}
        self.tally = Tally(subject="teachers", verdict="score")
        """Counts of trajectories with and without scores."""

    async def __aenter__(self) -> Self:
        try:
            for server in self._servers.values():
                await server.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.server.close()

    async def taught(self, trajectory: Trajectory, data_source: str) -> Trajectory:
        """Return a trajectory with its teacher's name and, if the teacher is at a URL and its weight is not 0, its
        scores.

        A trajectory whose teacher fails ends as ``teacher_error`` or ``teacher_timeout``, without a verdict, so that it
        is not trained on; ``reward.on_error`` decides about its group.

        Args:
            data_source: ``data_source`` of its task.

        Raises JobError after ``max_failures`` in a row, or if the server was unreachable for ``outage_s``.
        """
        name = teacher_of(self._teachers, data_source)
        if name is None:
            return trajectory
        trajectory = replace(trajectory, metadata={**trajectory.metadata, TEACHER: name})
        server = self._servers.get(name)
        if server is None:
            return trajectory
        config = self._teachers[name]
        try:
            with self.tally.waiting():
                scores = await _scored(server, trajectory)
        except RequestFailed as failure:
            server.failures += 1
            self.tally.add(failure.status, str(failure))
            if failure.away:
                raise JobError(
                    f"{failure}, for {teacher_role(name)}.outage_s={config.outage_s:g}; start the teacher's server, "
                    "and resume"
                ) from failure
            if server.failures >= config.max_failures:
                raise JobError(
                    f"{server.failures} trajectories in a row got no scores ({teacher_role(name)}.max_failures="
                    f"{config.max_failures}), the last because {failure}; correct the teacher's server, and resume"
                ) from failure
            return _failed(trajectory, failure)
        server.failures = 0
        self.tally.add("ok", None)
        return replace(trajectory, teacher_scores=scores)


async def score_rows(
    name: str, config: TeacherConfig, top_k: int, largest_id: int, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[TeacherScores]:
    """Return a teacher's scores of responses, given as (prompt ids, response ids). Arguments as of ``TeacherServer``.

    Raises:
        JobError: the server fails, or its reply cannot be used.
        ConfigError: as ``TeacherServer.open``.
    """
    server = TeacherServer(name, config, top_k, largest_id)
    try:
        await server.open()
        lengths = [(len(prompt), len(prompt) + len(response)) for prompt, response in pairs]
        asked = zip(map(np.concatenate, pairs), lengths, strict=True)
        return list(await asyncio.gather(*(server.scores(ids, range(*places)) for ids, places in asked)))
    except RequestFailed as failure:
        raise JobError(f"{failure}; correct the teacher's server and repeat the command, which goes on") from failure
    finally:
        await server.server.close()


async def _scored(server: TeacherServer, trajectory: Trajectory) -> TeacherScores:
    """Return the scores of all tokens of the model. Raises RequestFailed."""
    if any(turn.images for turn in trajectory.turns):
        raise RequestFailed(f"the teacher {server.name} is at a URL, and is not sent images")
    lines = list(lines_of(trajectory))
    asked = [server.scores(line.ids, [i for turn in line.turns.values() for i in range(*turn)]) for line in lines]
    found = await asyncio.gather(*asked)
    parts: dict[int, TeacherScores] = {}
    for line, scores in zip(lines, found, strict=True):
        start = 0
        for number, (first, end) in line.turns.items():
            parts[number] = scores.part(start, start + end - first)
            start += end - first
    return TeacherScores.joined([parts[number] for number in sorted(parts)])


def lines_of(trajectory: Trajectory) -> list[ScoredLine]:
    """Return the contexts in which a trajectory's tokens are trained, each up to its last trained token."""
    found = []
    for turns, new in trajectory.trained_lines():
        kept, at, places = turns[: turns.index(new[-1]) + 1], 0, {}
        for number in kept:
            end = at + len(trajectory.turns[number])
            if number in new:
                places[number] = (at, end)
            at = end
        found.append(ScoredLine(np.concatenate([trajectory.turns[number].token_ids for number in kept]), places))
    return found


def _failed(trajectory: Trajectory, failure: RequestFailed) -> Trajectory:
    """Return the trajectory without a verdict."""
    late = failure.status == "timeout"
    return replace(
        trajectory,
        reward=Reward(math.nan, failure.status, trajectory.reward.parts),
        cause=End.TEACHER_TIMEOUT if late else End.TEACHER_ERROR,
        metadata={**trajectory.metadata, "reward_message": str(failure)},
    )


def check_teacher_url(name: str, config: TeacherConfig) -> None:
    """Raise ConfigError unless the teacher's ``url`` is a base URL without a password."""
    check_url(f"{teacher_role(name)}.url", config.url or "", f"{KEY_VARIABLE}_{name}")


def check_teacher_servers(
    teachers: Mapping[str, TeacherConfig],
    ids: Collection[int],
    text_of: Callable[[Sequence[int]], str],
    context_tokens: int,
    top_k: int = 0,
) -> list[str]:
    """Check the servers of the teachers at URLs before a job starts: model, length, tokens, and one reply.

    Args:
        ids: All token ids of the student's tokenizer.
        text_of: Returns the text of tokens by the student's tokenizer.
        context_tokens: Most tokens of prompt and response together.

    Returns:
        Warnings about what could not be compared.

    Raises:
        ConfigError: names the setting, the server's answer and the fix.
    """
    return asyncio.run(_check(teachers, sorted(ids), text_of, context_tokens, top_k))


async def _check(
    teachers: Mapping[str, TeacherConfig],
    ids: Sequence[int],
    text_of: Callable[[Sequence[int]], str],
    context_tokens: int,
    top_k: int,
) -> list[str]:
    warnings = []
    for name, config in teachers.items():
        if config.url is None:
            continue
        role = teacher_role(name)
        server = TeacherServer(name, replace(config, outage_s=0.0), top_k)
        server.server.open()
        try:
            models = await server.server.models()
            server.model = server.model or next(iter(models))
            if server.model not in models:
                raise ConfigError(f"{role}.model={server.model!r} is not at {config.url}, which has {list(models)}")
            length = models[server.model]
            if length is not None and length <= context_tokens:
                raise ConfigError(
                    f"{role}.url={config.url} has max_model_len={length}; it needs {context_tokens + 1}: "
                    "rollout.max_prompt_tokens + rollout.max_response_tokens + 1; start it with a larger one"
                )
            warnings += await _check_tokens(server, ids, text_of, f"{role}.url={config.url}")
            try:
                probe = np.array(ids[: min(8, context_tokens)], np.int32)
                await server.scores(probe, range(1, len(probe)))
            except RequestFailed as failure:
                raise ConfigError(
                    f"{role}.url: {failure}; it must be vLLM's server, with --max-logprobs of at least {max(top_k, 1)}"
                ) from failure
        finally:
            await server.server.close()
    return warnings


async def _check_tokens(
    server: TeacherServer, ids: Sequence[int], text_of: Callable[[Sequence[int]], str], where: str
) -> list[str]:
    """Compare the texts of all token ids. Raises ConfigError naming the first id with another text."""
    for start in range(0, len(ids), PROBED):
        part = ids[start : start + PROBED]
        try:
            different = await _first_difference(server, part, text_of)
        except RequestFailed as failure:
            if failure.http_status not in (404, 405, 501):
                raise ConfigError(f"{where}: its tokens cannot be compared with the student's: {failure}") from failure
            return [f"{where} has no /detokenize: make sure that its tokenizer is the student's"]
        if different is not None:
            token, other = different
            raise ConfigError(
                f"{where}: token {token} is {other!r} there, and {text_of([token])!r} in the student's tokenizer; use "
                "a teacher with the same tokenizer"
            )
    return []


async def _first_difference(
    server: TeacherServer, ids: Sequence[int], text_of: Callable[[Sequence[int]], str]
) -> tuple[int, str] | None:
    """Return the first id with another text at the server, and that text. Texts of several tokens together may differ
    in spaces although those of each token are equal."""
    other, own = await server.text_of(ids), text_of(ids)
    if other in (own, _cleaned(own)):
        return None
    if len(ids) == 1:
        return ids[0], other
    middle = len(ids) // 2
    first = await _first_difference(server, ids[:middle], text_of)
    return first if first is not None else await _first_difference(server, ids[middle:], text_of)


def _cleaned(text: str) -> str:
    for each in CLEANED:
        text = text.replace(each, each.strip())
    return text
