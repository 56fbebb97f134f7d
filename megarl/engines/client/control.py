"""Blocking controls of one engine server, for trainer and supervisor. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.core.errors import EngineError
from megarl.engines.client.names import PROVING, bearer, last_lines
from megarl.engines.client.probe import Probed, Scores

_POLL_S = 0.1
_QUEUED_POLL_S = 0.005
_REPORT_S = 5.0
"""Seconds from a worker's timeout until its reason arrives."""
SLEEPING = "the engine sleeps: its weights were freed, and it generates after the next publication"
"""Refusal reason of a sleeping engine."""
Pause = Literal["abort", "wait", "keep"]
"""Treatment of running requests in a pause: abort them, wait for them, or continue them afterwards."""
FAILURE = "failure"
"""Key of the error in a worker's reply."""


@dataclass(frozen=True)
class EngineState:
    """State of an engine; ``refusing`` is the reason if it refuses requests, else None."""

    version: str
    paused: bool
    refusing: str | None
    start: int
    """``EngineRow.start`` of this process; a random number without a supervisor."""
    workers: int
    """Workers that hold its weights: tp * pp."""


@dataclass(frozen=True)
class Drafts:
    """Tokens that an engine has drafted since its start; ``accepted``: as many as the model has kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class EngineControl:
    """One engine server at ``url``. Every method raises EngineError with the server's message if refused."""

    url: str
    key: str
    timeout_s: float = 120.0
    log: Path | None = None
    proving: bool = False
    """True sends requests that the engine serves even while it refuses others."""

    def wait_ready(
        self, timeout_s: float, alive: Callable[[], bool] = lambda: True, stopping: Callable[[], bool] = lambda: False
    ) -> float:
        """Wait until the server is ready; return the seconds.

        Args:
            alive: False once the server's process has ended.
            stopping: True once the job is asked to stop, since the server may then never be started.
        """
        start = time.monotonic()
        while not self._healthy():
            waited = time.monotonic() - start
            if stopping():
                raise EngineError(f"the job is asked to stop, and the engine at {self.url} is not ready")
            if not alive():
                raise EngineError(self._with_log(f"the engine at {self.url} died after {waited:.0f} s, not yet ready"))
            if waited > timeout_s:
                limit = f"rollout.start_timeout_s = {timeout_s:g}"
                raise EngineError(
                    self._with_log(f"the engine at {self.url} was not ready after {waited:.0f} s ({limit})")
                )
            time.sleep(_POLL_S)
        try:
            self.state()
        except EngineError as error:
            raise EngineError(
                f"{error}; a server without megarl's routes was started from an environment where megarl's entry point "
                "in vllm.endpoint_plugins is not installed: install the package again (pip install --no-deps -e .)"
            ) from error
        return time.monotonic() - start

    def state(self, timeout_s: float | None = None) -> EngineState:
        answer = self.call("GET", "/megarl/state", timeout_s=timeout_s)
        try:
            return EngineState(**answer)
        except TypeError as error:
            raise self._malformed("GET /megarl/state", answer) from error

    def pause(self, mode: Pause = "wait", timeout_s: float | None = None) -> None:
        """Stop scheduling; later requests queue. ``wait`` lets running requests end first, ``keep`` continues them
        after ``resume``."""
        self.call("POST", f"/pause?mode={mode}", timeout_s=timeout_s)

    def drain(self, given_up: Callable[[], bool], try_s: float = 10.0) -> None:
        """Pause, waiting without limit for the running requests, or until ``given_up`` (checked every ``try_s``).

        The caller cancels a stalled request (``rollout.request_timeout_s``).
        """
        while True:
            try:
                self.pause("wait", try_s)
                return
            except EngineError as error:
                if given_up():
                    return
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                self.state()  # check that the engine is alive

    def resume(self) -> None:
        """Let the engine generate again."""
        self.call("POST", "/resume")

    def refuse(self, reason: str | None, version: str | None = None) -> None:
        """Make the engine refuse generation with 503 and ``reason``; None lets it generate with proven ``version``."""
        self.call("POST", "/megarl/refuse", {"reason": reason, "version": version})

    def sleep(self, keep_weights: bool = False) -> list[dict[str, int]]:
        """Free the KV cache, and free the weights or keep them in host memory. Aborts running requests. Returns
        ``freed`` and ``rss`` in bytes of each worker.

        The engine refuses generation until a publication and ``wake`` have restored weights and KV cache, in any order.
        It may sleep before a trainer joins; a second sleep has no effect.
        """
        self.refuse(SLEEPING)
        self.pause("abort")  # requests of a cancelled rollout, which a stopping job must not wait for
        self.reset_prefix_cache()
        self.call("POST", "/megarl/asleep", {"asleep": True})
        answers: list[dict[str, int]] = self.workers("megarl_sleep", keep_weights)
        return answers

    def wake(self, what: Literal["weights", "kv_cache"]) -> list[dict[str, int]]:
        """Allocate memory again; return ``taken`` and ``rss`` in bytes of each worker. No effect if awake.

        Weights must wake before the publication of their values. If weights were published during the KV cache's sleep,
        the engine generates once the cache wakes.
        """
        answers: list[dict[str, int]] = self.workers("megarl_wake", what)
        if what == "kv_cache":
            self.call("POST", "/megarl/asleep", {"asleep": False})
        return answers

    def init(self, info: Mapping[str, Any]) -> None:
        """Make every worker join the trainer's group (``megarl.engines.sync.receiver.InitInfo``)."""
        self.call("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    def start(self) -> None:
        """Begin a weight update."""
        self.call("POST", "/start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        """Make every worker receive weights; return when all have (``megarl.engines.sync.receiver.UpdateInfo``).

        A worker times out after ``timeout_s`` and reports the missing message.
        """
        self.call("POST", "/update_weights", {"update_info": dict(info)}, self.timeout_s + _REPORT_S)

    def finish(self, version: str) -> None:
        """End a weight update under a version."""
        self.call("POST", "/finish_weight_update", {"weight_version": version})

    def reset_prefix_cache(self, *, running: bool = False) -> None:
        """Clear cached keys and values of older weights; fails while requests use some of them.

        Args:
            running: Clear those of running requests too; they are recomputed when the engine resumes.
        """
        answer = self.call("POST", f"/reset_prefix_cache{'?reset_running_requests=true' if running else ''}")
        if not isinstance(answer, dict) or "success" not in answer:
            raise self._malformed("POST /reset_prefix_cache", answer)
        if not answer["success"]:
            raise EngineError(f"the engine at {self.url} kept its prefix cache: requests still run; pause it first")

    def workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``megarl.engines.sync.receiver.WorkerExtension`` on every worker, in rank order.

        Raises:
            EngineError: a worker failed.
        """
        answer = self.call("POST", "/collective_rpc", {"method": method, "args": list(args)})
        if not isinstance(answer, dict) or not isinstance(answers := answer.get("results"), list):
            raise self._malformed(f"POST /collective_rpc {method}", answer)
        failed = failures(answers)
        if failed:
            raise EngineError(self._with_log(f"the engine at {self.url} failed in {method}: {failed}"))
        return answers

    def probe(self, token_ids: Sequence[int], *, decode: int = 0, first: str | None = None) -> Probed:
        """Return log-probs of ``token_ids[1:]``, and of ``decode`` further tokens that the engine samples: computed by
        decoding, and again in a prompt, without vLLM's prefix cache. ``first``: name of a request with priority over
        waiting ones; only for engines with ``sync.pause=keep``."""
        text = self.scores(token_ids, decode + 1, first=first)  # the prompt's forward pass gives the first token
        again = self.scores([*token_ids, *text.tokens], 1, first=first).prompt[-decode:] if decode else []
        return Probed(text.prompt, text.sampled[1:], again, text.tokens[1:])

    def await_queued(self, name: str, ended: Callable[[], bool]) -> None:
        """Return once vLLM has queued the request ``name``, or it has ``ended``, so that later calls come after it."""
        asked = f"/megarl/queued?name={name}"
        while not ended():
            answer = self.call("GET", asked)
            if not isinstance(answer, dict) or "queued" not in answer:
                raise self._malformed(f"GET {asked}", answer)
            if answer["queued"]:
                return
            time.sleep(_QUEUED_POLL_S)

    def scores(self, token_ids: Sequence[int], sample: int, **how: Any) -> Scores:
        """Return log-probs of a text and of tokens sampled after it; ``how``: as in ``Scores.request``."""
        answer = self.call("POST", "/inference/v1/generate", Scores.request(token_ids, sample, **how))
        try:
            return Scores.of(answer, token_ids, sample, prompt="among" not in how)
        except (LookupError, TypeError, ValueError) as error:
            raise self._malformed("POST /inference/v1/generate", str(answer)[:200]) from error

    def drafts(self) -> Drafts:
        """Return the counts of drafts since the engine's start (``rollout.speculative``)."""
        answer = self.call("GET", "/megarl/drafts")
        try:
            return Drafts(**answer)
        except TypeError as error:
            raise self._malformed("GET /megarl/drafts", answer) from error

    def health(self, timeout_s: float) -> None:
        """Return if the server reports that it is healthy."""
        self.call("GET", "/health", timeout_s=timeout_s)

    def _healthy(self) -> bool:
        try:
            self.health(5.0)
        except EngineError:
            return False
        return True

    def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Send a request to the engine; return its JSON reply, or None if empty.

        Args:
            timeout_s: Timeout in seconds instead of this object's.

        Raises EngineError.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **bearer(self.key), **({PROVING: "1"} if self.proving else {})}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        asked = f"{method} {path}"
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            reason = _message(_rest(error).decode(errors="replace"))
            raise EngineError(f"the engine at {self.url} answered {error.code} to {asked}: {reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                self._with_log(f"the engine at {self.url} did not answer {asked}: {error or type(error).__name__}")
            ) from error
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise self._malformed(asked, text[:200]) from error

    def _malformed(self, asked: str, answer: Any) -> EngineError:
        return EngineError(self._with_log(f"the engine at {self.url} sent a malformed answer to {asked}: {answer!r}"))

    def _with_log(self, message: str) -> str:
        return message if self.log is None else f"{message}\nlast lines of {self.log}:\n{last_lines(self.log)}"


def failures(answers: Sequence[Any]) -> str:
    """Return the errors of workers by rank; ``""`` without errors."""
    return "; ".join(
        f"worker {rank}: {answer[FAILURE]}"
        for rank, answer in enumerate(answers)
        if isinstance(answer, dict) and FAILURE in answer
    )


def _rest(error: urllib.error.HTTPError) -> bytes:
    """Return the received part of a refusal's body."""
    try:
        return error.read()
    except http.client.IncompleteRead as partial:
        return partial.partial
    except (OSError, http.client.HTTPException):
        return b""


def _message(text: str) -> str:
    """Return the message in vLLM's or our error body, else the body."""
    try:
        found = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()
    return found["message"] if isinstance(found, dict) and "message" in found else str(found)
