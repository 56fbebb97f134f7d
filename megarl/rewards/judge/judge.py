"""A language model as the judge of answers, on any OpenAI-compatible server, with a cache of judgements.

The judge mostly waits: one ``Judge`` runs in the explorer's event loop, not in the pool's processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from megarl.config.rewards import JUDGE_IS_ROLLOUT, JudgeConfig
from megarl.core.errors import ConfigError
from megarl.core.text import without_surrogates
from megarl.rewards.answer.grammar import after_thinking
from megarl.rewards.judge.rubric import Vote, fill, read_rubric, read_vote, reference_text, tally
from megarl.rewards.model_server import ModelServer, RequestFailed, check_url

log = logging.getLogger(__name__)

BUSY_S = 60.0
"""Lock timeout in seconds of writers; each write takes milliseconds."""


class JudgementCache:
    """Cache of verdicts by key. The replies are stored for inspection (``SELECT result, replies FROM judgements``).

    Each write is one transaction with SQLite's ordinary journal. A separate thread reads and writes, so that an event
    loop does not wait for the disk. If the file fails later, the error is logged and the judge goes on without the
    cache.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            self._connection.execute("PRAGMA synchronous=NORMAL")
            with self._connection:
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, result TEXT NOT NULL, replies TEXT "
                    "NOT NULL) WITHOUT ROWID"
                )
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"reward.judge.cache={path}: cannot be opened ({error}); remove the file, or choose another path or "
                "null"
            ) from error
        self._thread = ThreadPoolExecutor(1, "judge-cache")

    async def get(self, key: str) -> dict[str, Any] | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._get, key)

    async def put(self, key: str, result: dict[str, Any], replies: Sequence[str]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._put, key, result, list(replies))

    def _get(self, key: str) -> dict[str, Any] | None:
        try:
            row = self._connection.execute("SELECT result FROM judgements WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            log.warning("reward.judge.cache=%s cannot be read: %s", self._path, error)
            return None
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, result: dict[str, Any], replies: list[str]) -> None:
        row = (key, json.dumps(result), without_surrogates(json.dumps(replies, ensure_ascii=False)))
        try:
            with self._connection:
                self._connection.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            log.warning("reward.judge.cache=%s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Finish pending writes, then close."""
        self._thread.shutdown()
        self._connection.close()


KEY_VARIABLE = "MEGARL_JUDGE_KEY"
ROLLOUT_MODEL = "policy"
"""Name under which ``launch.engine_process`` serves its model."""

SECOND_TEMPERATURE = 0.7
"""Minimum temperature of a retry after a reply without a verdict: a greedy judge would repeat the reply."""
NO_ANSWER = "I do not know."
"""Answer judged after another answer got no verdict: a verdict on this one shows that the other is at fault."""
WRONG = {"score": 0.0, "status": "wrong", "acc": False, "votes_for": 0, "votes_against": 0, "cached": False}
"""Verdict on an answer that is not judged."""
CACHE_FORMAT = 1
"""Cache version: raise it when the prompt or the parsing of replies changes."""


class _Reply(NamedTuple):
    text: str
    finish_reason: str | None


class Judge:
    """Judges answers. Use as an async context manager.

    Args:
        engines: Returns the current URLs of the job's engines, for ``url: rollout``. They are used in turn and may
            change.
        key: The job's key, sent only to these engines; other servers get the key of MEGARL_JUDGE_KEY.
        engine_timeout_s: Seconds to wait for an engine that is being replaced.

    Raises:
        ConfigError: a setting is missing or wrong; on entering: the cache cannot be opened, or the server does not name
            its model.
    """

    def __init__(
        self,
        config: JudgeConfig,
        engines: Callable[[], Sequence[str]] = lambda: (),
        key: str | None = None,
        engine_timeout_s: float = 0.0,
    ) -> None:
        _check_settings(config)
        assert config.url is not None, "_check_settings refuses None"
        self._config = config
        self._rubric = read_rubric(config.rubric)
        own = config.url == JUDGE_IS_ROLLOUT
        if own:
            if not engines():
                raise ConfigError(
                    "reward.judge.url=rollout: there are no engines here (MEGARL_ENGINES); give the URL of a server"
                )
            self._model = config.model or ROLLOUT_MODEL
        else:
            key = os.environ.get(KEY_VARIABLE)
            self._model = config.model or ""
        url = config.url.rstrip("/")

        def bases() -> list[str]:
            return [f"{engine.rstrip('/')}/v1" for engine in engines()] if own else [url]

        self.server = ModelServer(
            "the judge", "reward.judge", KEY_VARIABLE, bases, key or None, config, engine_timeout_s if own else 0.0
        )
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._cache: JudgementCache | None = None
        self.counts: Counter[str] = self.server.counts
        """Counts since the start: requests, retries, cached and shared judgements; prompt_tokens and completion_tokens
        from the server."""

    async def __aenter__(self) -> Self:
        cache = self._config.cache
        self._cache = None if cache is None else JudgementCache(cache)
        self.server.open()
        if not self._model:
            try:
                self._model = next(iter(await self.server.models()))
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel requests in flight."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.server.close()
        if self._cache is not None:
            self._cache.close()

    async def score(
        self,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        question: str | None = None,
    ) -> dict[str, Any]:
        """Return the verdict on one answer, without its thoughts up to ``</think>``. Server failures do not raise.

        ``question`` defaults to that of ``extra_info``. Returns ``score``, ``status``, ``acc``, ``votes_for``,
        ``votes_against``, ``cached``; with an error or timeout also ``reason``. An answer that is empty after its
        thoughts is wrong without a request.
        """
        question = question or str((extra_info or {}).get("question") or "")
        answer, reference = after_thinking(solution_str).strip(), reference_text(ground_truth)
        if not question.strip():
            return _failure("error", "the judge needs a question: the prompt, or extra_info['question'], is empty")
        if not answer:
            return dict(WRONG)
        key = self._cache_key(question, answer, reference)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._judgement(key, question, answer, reference))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            self.counts["shared"] += 1
        return dict(await asyncio.shield(task))  # cancelling this caller does not cancel the request for others

    async def reply(self, prompt: str) -> str:
        """Return the model's text after a prompt, from the cache if present.

        Raises RequestFailed.
        """
        body = self._body(prompt, 0, self._config.temperature)
        key = hashlib.sha256(json.dumps([CACHE_FORMAT, "reply", self._config.url, body]).encode()).hexdigest()
        if self._cache is not None and (found := await self._cache.get(key)) is not None:
            self.counts["cached"] += 1
            return str(found["text"])
        text = (await self.server.request("POST", "/chat/completions", body, self._read_reply)).text
        if self._cache is not None:
            await self._cache.put(key, {"text": text}, [text])
        return text

    def _body(self, prompt: str, seed: int, temperature: float) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._config.max_tokens,
            "temperature": temperature,
            "seed": seed,
        }

    def _cache_key(self, question: str, answer: str, reference: str) -> str:
        c = self._config
        parts = [
            CACHE_FORMAT,
            c.url,
            self._model,
            self._rubric,
            question,
            answer,
            reference,
            c.votes,
            c.temperature,
            c.max_tokens,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    async def _judgement(self, key: str, question: str, answer: str, reference: str) -> dict[str, Any]:
        if self._cache is not None and (found := await self._cache.get(key)) is not None:
            self.counts["cached"] += 1
            return found | {"cached": True}
        prompt = fill(self._rubric, question, answer, reference)
        replies: list[str] = []
        outcomes = await asyncio.gather(*(self._vote(prompt, index, replies) for index in range(self._config.votes)))
        votes = [outcome for outcome in outcomes if isinstance(outcome, Vote)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed)]
        if not votes:
            if all(failure.refused for failure in failed) and await self._judges(question, NO_ANSWER, reference):
                return WRONG
            if failed:
                late = all(failure.status == "timeout" for failure in failed) and len(failed) == len(outcomes)
                return _failure("timeout" if late else "error", str(failed[0]))
            return _failure("error", f"no verdict: the judge's last reply ends with {replies[-1][-200:]!r}")
        result = tally(votes)
        if self._cache is not None and not failed:  # fewer votes than configured are used, but not cached
            await self._cache.put(key, result, replies)
        return result | {"cached": False}

    async def _judges(self, question: str, answer: str, reference: str) -> bool:
        """Return True if the judge gives a verdict on an answer."""
        return isinstance(await self._vote(fill(self._rubric, question, answer, reference), 0, []), Vote)

    async def _vote(self, prompt: str, index: int, replies: list[str]) -> Vote | RequestFailed | None:
        """Return one vote; None after two replies without a verdict."""
        temperature = self._config.temperature
        asked = ((index, temperature), (self._config.votes + index, max(temperature, SECOND_TEMPERATURE)))
        for seed, warmth in asked:
            body = self._body(prompt, seed, warmth)
            try:
                reply = await self.server.request("POST", "/chat/completions", body, self._read_reply)
            except RequestFailed as failure:
                return failure
            replies.append(reply.text)
            if (vote := read_vote(*reply)) is not None:
                return vote
        return None

    def _read_reply(self, answer: Any) -> _Reply:
        choice = answer["choices"][0]
        for name in ("prompt_tokens", "completion_tokens"):
            self.counts[name] += int((answer.get("usage") or {}).get(name) or 0)
        if choice.get("finish_reason") == "abort":
            raise ValueError("the engine gave it up, to be given weights")
        text = choice["message"].get("content")  # null if a server puts all text into reasoning_content
        return _Reply("" if text is None else str(text), choice.get("finish_reason"))


def _failure(status: str, reason: str) -> dict[str, Any]:
    return {
        "score": 0.0,
        "status": status,
        "acc": False,
        "votes_for": 0,
        "votes_against": 0,
        "cached": False,
        "reason": reason,
    }


def _check_settings(config: JudgeConfig) -> None:
    if config.url is None:
        raise ConfigError(
            "reward.judge.url is not set, and rows go to the judge; give a server's base URL (http://HOST:PORT/v1) or "
            "rollout"
        )
    if config.url != JUDGE_IS_ROLLOUT:
        check_url("reward.judge.url", config.url, KEY_VARIABLE, " or rollout")
    elif config.model not in (None, ROLLOUT_MODEL):
        raise ConfigError(
            f"reward.judge.model={config.model!r} with url=rollout, where the model is {ROLLOUT_MODEL}; leave it out"
        )
    if config.votes > 1 and config.temperature == 0:
        raise ConfigError(
            f"reward.judge.votes={config.votes} at temperature 0 are the same reply {config.votes} times; set "
            "reward.judge.temperature above 0, or votes to 1"
        )


def check_judge(config: JudgeConfig, *, context_tokens: int) -> None:
    """Check the judge before launch, if rows go to it. Requests the server's models, except from the job's engines.

    Args:
        context_tokens: Maximum tokens of prompt and response together in these engines.

    Raises:
        ConfigError: a setting or the rubric is wrong, the server does not answer, or has no such model.
    """
    _check_settings(config)
    read_rubric(config.rubric)
    if config.url == JUDGE_IS_ROLLOUT:
        if config.max_tokens >= context_tokens:
            raise ConfigError(
                f"reward.judge.max_tokens={config.max_tokens} leaves no room for a prompt in the engines' "
                f"{context_tokens} tokens (rollout.max_prompt_tokens + rollout.max_response_tokens): rubric, question "
                "and answer come first; lower it"
            )
        return
    asyncio.run(_check_model(config))


async def _check_model(config: JudgeConfig) -> None:
    async with Judge(dataclasses.replace(config, cache=None)) as judge:  # entering requests the model if none is named
        if config.model is not None and config.model not in (names := await judge.server.models()):
            raise ConfigError(
                f"reward.judge.model={config.model!r} is not at {config.url}, which has {', '.join(list(names)[:20])}"
            )
