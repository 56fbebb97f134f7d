"""This machine's sandbox, once a self-test has proven its isolation."""

from __future__ import annotations

import dataclasses
import logging
import threading

from megarl.core.errors import SandboxError
from megarl.sandbox import host, selftest
from megarl.sandbox.local import LocalSandbox

_lock = threading.Lock()
known: dict[str | None, LocalSandbox] = {}
"""Interpreter that was asked for -> the sandbox that a self-test has proven."""


def local_sandbox(python: str | None = None) -> LocalSandbox:
    """This machine's sandbox with that interpreter (None: one that it finds), after a self-test once per process.

    Raises SandboxError when the isolation is not proven.
    """
    with _lock:
        if python not in known:
            found = host.find(python)
            try:
                sandbox = LocalSandbox(found)
                selftest.prove(sandbox)
            except SandboxError as error:
                sandbox = LocalSandbox(dataclasses.replace(found, nested=False))
                selftest.prove(sandbox)
                logging.warning("each program is run by a separate bwrap, which is slow, for here %s", error)
            known[python] = sandbox
        return known[python]
