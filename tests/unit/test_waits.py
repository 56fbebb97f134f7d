"""Calls that may block without a limit of their own: each is listed here, with what limits it. docs/faults.md lists the
limits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megarl

ROOT = Path(megarl.__file__).parent
WITHOUT_ARGUMENTS = {
    "wait",
    "join",
    "get",
    "result",
    "communicate",
    "acquire",
    "accept",
    "readline",
    "shutdown",
    "recv",
    "barrier",
}
"""Methods that wait without end unless they are given a timeout; of strings and dicts they have arguments."""
ALWAYS = {"recv", "recv_bytes", "waitpid", "select", "lockf"}
"""Those that have no timeout to give."""
FUNCTIONS = {"run", "check_output", "check_call", "call", "urlopen", "create_connection"}
"""Of subprocess, urllib and socket, which take ``timeout``."""
POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
"""As context managers they wait for all their work."""
LIMITED = {
    "checkpoint/manifest._digested: with ThreadPoolExecutor": "looks at the stop request after every 4 MiB",
    "checkpoint/pool.each: future.result": "`megarl convert`, a command of a person: it has completed by then",
    "checkpoint/pool.each: pool.shutdown": "`megarl convert`: what runs ends at its next count of bytes",
    "checkpoint/save.Save.finish: part.results.put": "a queue without bound",
    "checkpoint/save.Save.finish: self._pending.result": "Writer.answer: as long as the writer writes; the watchdog "
    "ends a stall (cluster.stall_s)",
    "checkpoint/save._write_files: counted.put": "a queue without bound",
    "checkpoint/save._write_files: results.get": "the same thread has put the result there",
    "checkpoint/writer.Writer.answer: self._pipe.recv": "a result is there, or the writer has died",
    "checkpoint/writer._serve: pipe.recv": "the writer's life; it dies with its trainer rank (die_with)",
    "launch/reaper.Reaper._keep: self._process.wait": "a daemon thread that waits for the guard's end",
    "launch/node.on_every_node: with ThreadPoolExecutor": "each node stops in its grace and node.GONE_S, or is lost "
    "(cluster.heartbeat_s)",
    "launch/remote.Gathering._let_in: self._door.accept": "a daemon thread; leaving the gathering shuts its socket",
    "launch/run_dir.next_attempt: fcntl.flock": "another head that counts: it reads and writes one line",
    "loop/ranks.Ranks.wait_for_all: dist.barrier": "a collective: groups.collective_timeout_s",
    "ops/linear._InForward.forward: gradients.result": "no wait: a sum of gradients",
    "ops/linear._Recompute.backward: gradients.result": "no wait: a sum of gradients",
    "reshard/execute._Incoming._message: arrival.wait": "sync.timeout_s: the timeout of the link",
    "reshard/execute._Outgoing._wait: work.wait": "sync.timeout_s: the timeout of the link",
    "reshard/transport.Received.wait: self.work.wait": "sync.timeout_s, or groups.collective_timeout_s of the default "
    "group",
    "rewards/child.RewardProcess._watch: self._process.wait": "a task that waits for the process's end; `end` waits "
    "END_S for it",
    "rewards/host.RewardHost._refusal: reader.readline": "asyncio.wait_for, process.CONNECT_S",
    "rewards/judge_cache.JudgementCache.close: self._thread.shutdown": "one statement of SQLite, whose locks have a "
    "timeout",
    "rewards/worker_queue.WorkerQueue._next: self._idle.get": "asyncio.timeout_at: STUCK_S beyond reward.timeout_s",
    "rewards/process.RemoteWorker._greeting: reader.readline": "asyncio.timeout, process.CONNECT_S",
    "rewards/process.Worker._exchange: self._reader.readline": "asyncio.wait_for, the verifier's timeout",
    "rewards/worker.serve: requests.readline": "the worker's life; it dies with its parent (die_with)",
    "rollout/endpoint._stream: frames.get": "asyncio.timeout, the time between two heartbeats",
    "rollout/watch.EngineWatch.__exit__: self._thread.join": "one answer of an engine: watch.ANSWER_S",
    "sandbox/box.Box.receive: self.wait": "box.START_S",
    "sandbox/box.Box.send_test: self.wait": "box.START_S",
    "sandbox/box.Box.wait: self._link.recv": "the timeout of its socket, box.START_S",
    "sandbox/box.read: link.recv": "the timeout of its socket, what is left until the deadline",
    "sandbox/inside/zygote.end_all: os.waitpid": "its children have been killed",
    "sandbox/local.LocalSandbox.check: answers.wait": "box.START_S",
    "sandbox/selftest._receive: link.recv": "the timeout of its socket, selftest.GONE_S",
    "store/waiting._marking: with ThreadPoolExecutor": "connect_timeout of libpq",
    "sync/fleet.EngineFleet.calling: with ThreadPoolExecutor": "one request to each engine: sync.timeout_s, or "
    "rollout.start_timeout_s while they start",
    "sync/fleet.results: future.result": "one request to each engine: sync.timeout_s",
    "sync/link.Link.irecv: self._open().recv": "does not wait: it begins to receive",
    "sync/receiver.Receiver.init_transfer_engine: self.shutdown": "no wait: closes the link",
    "sync/receiver.Receiver.receive_weights: self.shutdown": "no wait: closes the link",
    "sync/shared.Borrower.finish: work.wait": "sync.timeout_s: the timeout of the link",
    "sync/shared._Borrowed.wait: self.told.wait": "sync.timeout_s: the timeout of the link",
    "sync/shared._Lent.wait: self.link.irecv(1, self.rank, lambda: torch.empty(1, dtype=torch.uint8, "
    "device='cpu')).wait": "sync.timeout_s: the timeout of the link",
    "sync/shared._Lent.wait: self.told.wait": "sync.timeout_s: the timeout of the link",
    "tracking.ThreadedTracker._serve: self._records.get": "a daemon thread",
}
"""Where, and what limits it."""


def _name(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _endless(call: ast.Call) -> bool:
    if any(keyword.arg in ("timeout", "timeout_s", "wait") for keyword in call.keywords):
        return False
    name, owner = _name(call), _owner(call)
    if name in ALWAYS:
        return owner not in ("", "sqlalchemy") and not (name == "select" and owner != "select")
    if name == "put":
        return len(call.args) == 1
    if name in WITHOUT_ARGUMENTS:
        return bool(owner) and not call.args
    if name in FUNCTIONS:
        return owner in ("subprocess", "urllib.request", "request", "socket")
    return name == "flock" and "LOCK_NB" not in ast.unparse(call)


def _walk(node: ast.AST, where: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = (
            f"{where}.{child.name}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else where
        )
        if isinstance(child, ast.Call) and _endless(child):
            yield f"{inner}: {ast.unparse(child.func)}"
        if isinstance(child, ast.With | ast.AsyncWith):
            pools = [item.context_expr for item in child.items if isinstance(item.context_expr, ast.Call)]
            yield from (f"{inner}: with {_name(pool)}" for pool in pools if _name(pool) in POOLS)
        yield from _walk(child, inner)


def endless() -> set[str]:
    files = (path for path in ROOT.rglob("*.py"))
    return {
        found
        for path in files
        for found in _walk(ast.parse(path.read_text()), str(path.relative_to(ROOT).with_suffix("")))
    }


def test_every_wait_without_a_timeout_is_listed() -> None:
    assert endless() - LIMITED.keys() == set(), "give it a timeout, or say here what limits it"


def test_nothing_is_listed_that_is_gone() -> None:
    assert LIMITED.keys() - endless() == set()
