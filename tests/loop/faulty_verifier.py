"""Verifier of the game ``guess``, which fails at every fifth response the first time it reads it, in one of 20 ways.

Workers are processes, some of which die here: what has failed is a file each, in the folder ``MEGARL_TEST_FAULTS``.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.loop.fault_kinds import EXCEPTIONS

KINDS = (*EXCEPTIONS, "exit", "kill", "hang", "none", "text", "nan", "parts", "status")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """1.0 where the last guess of a response is right."""
    name = hashlib.sha256(f"{solution_str}|{ground_truth}|{extra_info}".encode()).hexdigest()
    if int(name, 16) % 5 == 0 and is_first(name):
        number = len(list(Path(os.environ["MEGARL_TEST_FAULTS"]).glob("once_*"))) - 1
        return failed(KINDS[number % len(KINDS)])
    guesses = re.findall(r"-?\d+", solution_str)
    return float(bool(guesses) and int(guesses[-1]) == int(ground_truth))


def is_first(name: str) -> bool:
    try:
        with Path(os.environ["MEGARL_TEST_FAULTS"], f"once_{name}").open("x"):
            return True
    except FileExistsError:
        return False


def failed(kind: Any) -> Any:
    Path(os.environ["MEGARL_TEST_FAULTS"], f"kind_{KINDS.index(kind)}").touch()
    if isinstance(kind, BaseException):
        raise kind
    if kind == "exit":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        threading.Event().wait(3600)
    if kind == "parts":
        return {"score": 0.0, **{str(i): 1.0 for i in range(10_000)}}
    if kind == "status":
        time.sleep(0.01)
        print("noise", file=sys.stdout)
        return {"score": 0.0, "status": "error"}
    return {"none": None, "text": "good", "nan": float("nan")}[kind]
