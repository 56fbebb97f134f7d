"""The process that runs a reward function: one JSON line in, one out. ``python -m megarl.rewards.worker [FILE]``.

It may be killed at any time: it holds nothing. What the function prints goes to stderr, not into the protocol.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megarl.errors import ConfigError, describe
from megarl.rewards.router import compute_score, scorer_for
from megarl.rewards.verdict import to_verdict

PR_SET_PDEATHSIG = 1


def load_function(path: str | None) -> Callable[..., Any]:
    """``compute_score`` of a user's file, or megarl's own. Raises ConfigError when the file cannot be used."""
    if path is None:
        return compute_score
    if not Path(path).is_file():
        raise ConfigError(f"reward.path {path}: no such file")
    spec = importlib.util.spec_from_file_location("megarl_user_reward", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.path {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward.path {path}: cannot be imported: {describe(error, path)}") from error
    function = getattr(module, "compute_score", None)
    if not callable(function):
        raise ConfigError(
            f"reward.path {path}: defines no function "
            f"compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return function


def serve(requests: IO[str], replies: IO[str], path: str | None) -> None:
    """Answer requests until their end. The first reply says whether the function could be loaded."""
    try:
        function = load_function(path)
    except ConfigError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            if "prepare" in request:
                if path is None:
                    scorer_for(request["prepare"])
                _reply(replies, {"ready": True})
            else:
                _reply(replies, to_verdict(function(**request["score"])))
        except Exception as error:  # the user's code may raise anything; it becomes this sample's verdict
            _reply(replies, {"error": describe(error, path, function)})


def _reply(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _die_with(parent: int) -> None:
    """End with the explorer even in the middle of a user's endless loop, and however the explorer ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call above
        os._exit(1)


def main(arguments: list[str]) -> None:
    parent, path = int(arguments[0]), arguments[1] if len(arguments) > 1 else None
    _die_with(parent)
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    serve(requests, replies, path)


if __name__ == "__main__":
    main(sys.argv[1:])
