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
"""Requested interpreter -> sandbox proven by a self-test."""


def local_sandbox(python: str | None = None) -> LocalSandbox:
    """Return this machine's sandbox with interpreter ``python`` (None: a default), after one self-test per process.

    Raises SandboxError if the isolation is not proven.
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
