"""Calls that may block without a limit of their own: each is listed here, with what limits it. docs/faults.md lists the
limits."""

from __future__ import annotations

import ast
import functools
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
    "exam/runner.Runner.run_all: with ThreadPoolExecutor": "runner.LIMIT_S for each job",
    "train/loop/remote_copies.RemoteCopies.stop: self._process.wait": "SIGKILL before it",
    "rewards/again.SecondVerifier.replies: self._socket.recv": "no wait: the selector has seen bytes",
    "rewards/again.main: questions.readline": "the other side's life: its end is an end of file",
    "ops/divergence._LinearDivergence.backward: gradients.result": "no wait: a sum of tensors",
    "explore/agents/program.run_command: output.ended.wait": "rollout.agent_timeout_s",
    "explore/agents/program._end: output.ended.wait": "command.DRAIN_S",
    "explore/agents/program._end: output.drained.wait": "command.DRAIN_S",
    **dict.fromkeys(
        [
            f"explore/agents/inside.{wait}"
            for wait in ("main: subprocess.call", "accept: listening.accept", "copy: source.recv")
        ],
        "rollout.agent_timeout_s",
    ),
    "train/sync/look.EngineLook._faults: with ThreadPoolExecutor": "look.ANSWER_S",
    "explore/explorer/claimed.EngineTime.keep: self._changed.wait": "10 s",
    "explore/explorer/explorer.Explorer._finish: self._writer.put": "store.outage_s",
    "sandbox/local.is_over: link.recv": "no wait: not blocking",
    "core/processes/fork.Forked.poll: os.waitpid": "no wait: WNOHANG",
    "core/processes/fork.ForkServer.await_imports: self._requests.recv": "fork.START_S, set for the socket",
    "core/processes/fork.ForkServer.close: self._process.wait": "SIGKILL before it",
    "core/processes/fork.ForkServer.fork: self._requests.recv": "fork.START_S, set for the socket",
    "core/processes/fork.serve: os.waitpid": "a process that only forks another",
    "core/processes/memory_files.MemoryFiles._serve: self._socket.accept": "the node's supervisor: close() wakes it",
    "core/processes/memory_files.MemoryFiles._serve: connection.recv": "the socket's timeout",
    "core/processes/memory_files.names_in: connection.recv": "the node's supervisor answers at once, or has ended",
    "explore/environments/types.Episode.step: self._made.result": "no wait: the environment was made",
    "explore/environments/types.Episode.end: self._made.result": "no wait: the environment was made",
    "explore/environments/harbor_inside.Output.read: select.select": "harbor_inside.WATCH_S",
    "explore/environments/harbor_inside.main: link.readline": "the other side's life: its end is an end of file",
    "explore/environments/harbor_inside.reap: os.waitpid": "SIGKILL before it, or WNOHANG",
    "explore/environments/harbor_inside.run: process.wait": "SIGKILL before it",
    "explore/environments/harbor.HarborSandbox.__init__: STARTER.submit(self._start, inside).result": "a fork",
    "explore/environments/harbor.HarborSandbox._ask: self._lines.readline": "the socket's timeout",
    "explore/environments/harbor.HarborSandbox.close: self.process.wait": "SIGKILL before it",
    "explore/environments/types.Episode.close: made.result": "no wait: the environment was made",
    "explore/environments/openenv.Connection.ask: self._messages.get": "rollout.environment_timeout_s, after which "
    "kill closes the connection",
    "explore/environments/openenv.Connections.run: asyncio.run_coroutine_threadsafe(work, self._loop).result": "rollout"
    ".environment_timeout_s, after which kill ends it",
    "explore/environments/verifiers.Verifiers._take: self._lines.readline": "rollout.environment_timeout_s, after "
    "which kill ends it",
    "explore/environments/verifiers.VerifiersProcess._start: self.process.stdout.readline": "verifiers.CHECK_S",
    "explore/environments/verifiers.VerifiersProcess._start: self.process.wait": "its output has ended, at its exit",
    "explore/environments/verifiers.VerifiersProcess.end: self.process.wait": "SIGKILL before it",
    "explore/environments/verifiers_server.serve: listener.accept": "the explorer's life: PARENT_S after it",
    "explore/environments/verifiers_server.serve_episode.take: reader.readline": "the episode's: its end is an end of "
    "file, or SIGKILL",
    "explore/environments/verifiers_server.opening_of: first.result": "no wait: a future of asyncio that is done",
    "explore/environments/types._close: made.result": "no wait: the environment was made",
    "tasks/image_processor._faults: pool.shutdown": "images whose decoding has begun",
    "run/start._end: logging.shutdown": "no wait: flushes the handlers",
    "explore/explorer/trajectories._run: work.result": "no wait: the workflow has ended",
    "weights/checkpoint/training/manifest._digested: with ThreadPoolExecutor": "looks at the stop request after "
    "every 4 MiB",
    "weights/checkpoint/convert/open_checkpoint.each: future.result": "`megarl convert`, a command of a person: it has "
    "completed by then",
    "weights/checkpoint/convert/open_checkpoint.each: pool.shutdown": "`megarl convert`: what runs ends at its next "
    "count of bytes",
    "weights/checkpoint/training/save.Save.finish: part.results.put": "a queue without bound",
    "weights/checkpoint/training/save.Save.finish: self._pending.result": "Writer.answer: as long as the writer "
    "writes; the watchdog ends a stall (cluster.stall_s)",
    "weights/checkpoint/training/save._write_files: counted.put": "a queue without bound",
    "weights/checkpoint/training/save._write_files: results.get": "the same thread has put the result there",
    **dict.fromkeys(
        (
            "weights/checkpoint/training/kept_state.KeptState._exchange: work.wait",
            "weights/checkpoint/training/kept_state.KeptState._fetch: work.wait",
            "weights/checkpoint/training/kept_state.KeptState._receive: dist.recv",
            "weights/checkpoint/training/kept_state.KeptState.settle: self._sending.join",
        ),
        "the group's timeout; the watchdog ends a stall (cluster.stall_s)",
    ),
    "weights/checkpoint/training/writer.Writer.answer: self._pipe.recv": "a result is there, or the writer has died",
    "weights/checkpoint/training/writer._serve: pipe.recv": "the writer's life; it dies with its trainer rank "
    "(die_with)",
    "run/process/reaper.Reaper._keep: self.process.wait": "a daemon thread that waits for the guard's end",
    "run/nodes/node.on_every_node: with ThreadPoolExecutor": "each node stops in its grace and node.GONE_S, "
    "or is lost (cluster.heartbeat_s)",
    "run/nodes/remote.Gathering._let_in: self.door.accept": "a daemon thread; leaving the gathering shuts its socket",
    "run/run_dir/owner.next_attempt: fcntl.flock": "another head that counts: it reads and writes one line",
    "train/ranks.Ranks.wait_for_all: dist.barrier": "a collective: groups.collective_timeout_s",
    "weights/checkpoint/training/rank_state._gathered: dist.recv": "groups.collective_timeout_s",
    "ops/linear._InForward.forward: gradients.result": "no wait: a sum of gradients",
    "ops/linear._Recompute.backward: gradients.result": "no wait: a sum of gradients",
    "weights/reshard/execute.Incoming._message: arrival.wait": "sync.timeout_s: the timeout of the link",
    "weights/reshard/execute.Outgoing._wait: work.wait": "sync.timeout_s: the timeout of the link",
    "engines/sync/link._Expected.wait: self.received.wait": "sync.timeout_s: the timeout of the link",
    "weights/reshard/copy.Received.wait: self.work.wait": "sync.timeout_s, or groups.collective_timeout_s of "
    "the default "
    "group",
    "rewards/pool/child._ended: ended.wait": "a task that waits for the process's end; `end` waits END_S for it",
    "rewards/pool/host.RewardHost._refusal: reader.readline": "asyncio.timeout, process.CONNECT_S",
    "rewards/judge/judge.JudgementCache.close: self._thread.shutdown": "one statement of SQLite, whose "
    "locks have a timeout",
    "rewards/pool/pool.WorkerQueue._next: self._idle.get": "asyncio.timeout_at: STUCK_S beyond reward.timeout_s",
    "rewards/pool/process.RemoteRewardProcess._greeting: reader.readline": "asyncio.timeout, process.CONNECT_S",
    "rewards/pool/process.Worker._exchange: self.reader.readline": "asyncio.timeout, the verifier's timeout",
    "rewards/pool/worker.serve: requests.readline": "the worker's life; it dies with its parent (die_with)",
    "engines/server/endpoint.stream_frames: frames.get": "asyncio.timeout, the time between two heartbeats",
    "sandbox/local.Box.receive: self.wait": "local.START_S",
    "sandbox/local.Box.send_test: self.wait": "local.START_S",
    "sandbox/local.Box.wait: self._link.recv": "the timeout of its socket, local.START_S",
    "sandbox/local.read: link.recv": "the timeout of its socket, what is left until the deadline",
    "sandbox/inside/zygote.end_all: os.waitpid": "its children have been killed",
    "sandbox/local.LocalSandbox.check: answers.wait": "local.START_S",
    "tasks/tools/python_session.PythonSession._begun: box.wait": "local.START_S",
    "sandbox/selftest._receive: link.recv": "the timeout of its socket, selftest.GONE_S",
    "buffer/store/postgres_waiting._marking: with ThreadPoolExecutor": "connect_timeout of libpq",
    "train/sync/fleet.EngineFleet.calling: with ThreadPoolExecutor": "one request to each engine: sync.timeout_s, or "
    "rollout.start_timeout_s while they start",
    "train/sync/weights.WeightSync.quieting: with ThreadPoolExecutor": "given up: one try of EngineControl.drain",
    "train/sync/fleet.results: future.result": "one or two requests to each engine: sync.timeout_s each",
    "engines/sync/link.Link.connect: works.pop().wait": "sync.timeout_s, or five of them for a partner that ends in "
    "the middle of joining; the trainer's watchdog comes before that",
    "engines/sync/link.Link.irecv: self._open(rank).recv": "does not wait: it begins to receive",
    "engines/sync/link.Link.close: group.recv": "does not wait: it begins to receive, for a millisecond",
    "engines/sync/receiver.Receiver.init_transfer_engine: self.shutdown": "no wait: closes the link",
    "engines/sync/receiver.Receiver.receive_weights: self.shutdown": "no wait: closes the link",
    "engines/sync/shared.SharedMemoryReceiver.finish: work.wait": "sync.timeout_s: the timeout of the link",
    "engines/sync/shared._Borrowed.wait: self.notice.wait": "sync.timeout_s: the timeout of the link",
    "engines/sync/shared._Lent.wait: self.link.irecv(1, self.rank, lambda: torch.empty(1, dtype=torch.uint8, "
    "device='cpu')).wait": "sync.timeout_s: the timeout of the link",
    "engines/sync/shared._Lent.wait: self.notice.wait": "sync.timeout_s: the timeout of the link",
    "train/tracking.ThreadedTracker._serve: self._records.get": "a daemon thread",
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


@functools.cache
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


def test_no_wait_swallows_a_cancellation() -> None:
    """``asyncio.wait_for`` of Python 3.11 does, where what it waits for has just ended."""
    using = [str(path) for path in ROOT.rglob("*.py") if "asyncio.wait_for(" in path.read_text()]
    assert using == [], "use asyncio.timeout"
