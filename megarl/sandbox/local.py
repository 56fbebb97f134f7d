"""The sandbox on this machine: each batch of tests in a fresh sandbox, each test in a separate process.

The submission's sandbox contains only the program and the current test's input. Its output is untrusted and is judged
outside; tests written as assertions run in a second sandbox without the submission's processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from megarl.core.errors import SandboxError
from megarl.core.text import without_surrogates
from megarl.sandbox.box import GRACE_S, Box, Outer, Zygote
from megarl.sandbox.host import Host
from megarl.sandbox.interface import CheckResult, Checks, Limits, Result, Test
from megarl.sandbox.name_owners import owners

SLACK_S = 0.5
"""Grace period in seconds for the tests' process to report a total timeout before the program's process is killed."""


class LocalSandbox:
    """See ``Sandbox``. Thread-safe; each thread has a separate zygote. Made by ``open_sandbox``, after the
    self-test."""

    def __init__(self, host: Host) -> None:
        self.host = host
        """This machine's bwrap and interpreter."""
        self._threads = threading.local()

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        job = {"kind": "test", "program": without_surrogates(program), "limits": dataclasses.asdict(limits)}
        deadline = time.monotonic() + limits.total_s
        results: list[Result] = []
        while (
            len(results) < len(tests) and not (stop and results and not results[-1].ok) and time.monotonic() < deadline
        ):
            with self.open(limits) as box:
                box.set_job(job)
                results += _batch(box, tests[len(results) :], limits, deadline, stop)
            if box.lost:
                raise SandboxError("the sandbox was ended from outside while a program ran")
        return results

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        failed = (False,) * len(checks.tests)
        texts = Checks(tuple(map(without_surrogates, checks.tests)), without_surrogates(checks.setup), checks.entry)
        try:
            asked, library = owners(texts)
        except (SyntaxError, ValueError) as error:
            why = f"the tests do not parse: {error}"
            return CheckResult(failed, (why,) * len(failed), row_error=why)
        job = {
            "kind": "check",
            "tests": list(texts.tests),
            "setup": texts.setup,
            "entry": checks.entry,
            "asked": asked,
            "library": library,
        }
        deadline = time.monotonic() + limits.total_s
        both = dataclasses.replace(limits, cpu_s=limits.cpu_s * max(1, len(failed)), wall_s=limits.total_s + SLACK_S)
        here, there = socket.socketpair()
        with here, there, self.open(both, here) as tests, self.open(both, there) as answers:
            here.close()  # each end is now in one sandbox alone, and closes with it
            there.close()
            answers.start_answer(program, both, both.wall_s + SLACK_S)
            answers.wait()  # its start does not count towards the first test
            left = max(0.01, deadline - time.monotonic())
            tests.set_job({**job, "limits": dataclasses.asdict(both), "times": (limits.wall_s, left)})
            tests.send_test(Test(), left + SLACK_S, both)
            verdict = tests.receive(left + SLACK_S + GRACE_S)
            found = json.loads(verdict.value or "{}") if verdict is not None and verdict.ok else None
            answer = None
            if not (found and all(found["passed"])):
                tests.close()  # so that a program still running finds no peer and ends
                answer = answers.receive_now()
        if tests.lost or answers.lost:
            raise SandboxError("a sandbox was ended from outside while tests ran")
        if verdict is None or found is None:
            limit = (answer.limit if answer else None) or (verdict.limit if verdict else "wall")
            reason = f"limit: {limit}" if limit else f"the tests' process {verdict.reason if verdict else 'vanished'}"
            return CheckResult(failed, (reason,) * len(failed), limit=limit, stderr=answer.stderr if answer else "")
        if found["row_error"]:
            return CheckResult(failed, (found["row_error"],) * len(failed), row_error=found["row_error"])
        stderr, limit = (answer.stderr, answer.limit) if answer else ("", None)
        return CheckResult(tuple(found["passed"]), tuple(found["reasons"]), None, limit, stderr, verdict.seconds)

    def describe(self) -> str:
        slow = "" if self.host.nested else "; slowly: no namespaces within namespaces"
        return f"bubblewrap on this machine, Python {self.host.version} ({self.host.python}){slow}"

    @contextlib.contextmanager
    def open(self, limits: Limits, passed: socket.socket | None = None) -> Iterator[Box]:
        """Open a fresh sandbox; ``passed`` is passed in with its link. Leaving the context kills the sandbox."""
        if not self.host.nested:
            outer = Outer(self.host, "launcher", limits.tmp_bytes, passed, filtered=True)
            with Box(outer, outer.link, limits) as box:
                yield box
            return
        idle: list[Zygote] = self._threads.__dict__.setdefault("idle", [])
        while idle and not idle[-1].end():  # nothing to end: it answers, if nobody has killed it
            idle.pop()
        zygote = idle.pop() if idle else Zygote(self.host)
        with Box(zygote, zygote.open(limits.tmp_bytes, passed), limits) as box:
            yield box
        if not box.lost:
            idle.append(zygote)


def _batch(box: Box, tests: Sequence[Test], limits: Limits, deadline: float, stop: bool) -> Iterator[Result]:
    """Yield results of tests in one sandbox, until a test fails with ``stop``, leaves files or processes behind, or
    ends the sandbox."""
    for i, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wall_s = min(left, limits.wall_s)
        box.send_test(test, wall_s, limits)
        result = box.receive(wall_s + GRACE_S)
        if result is None and i > 0:
            return  # an earlier test's leftovers may be the cause
        if result is None:
            result = Result(-9, "wall", "", "the sandbox ended without a result", None, wall_s, 0.0)
        if result.limit == "wall" and wall_s < limits.wall_s:
            return  # the total time ran out, not the test's own
        yield result
        if box.used or (stop and not result.ok):
            return
