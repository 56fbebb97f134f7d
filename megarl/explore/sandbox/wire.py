"""Requests and replies of the service as JSON, the same for both sides."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megarl.explore.sandbox.inside import values
from megarl.explore.sandbox.interface import Call, CheckResult, Checks, Limits, Result, Test

KEY_VARIABLE = "MEGARL_SANDBOX_KEY"
MAX_BODY_BYTES = 64 * 2**20


def key() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def to_json(value: Any) -> Any:
    """Convert any dataclass of the interface but ``Test``."""
    return dataclasses.asdict(value)


def a_test_to(test: Test) -> Any:
    call = (
        None
        if test.call is None
        else {"function": test.call.function, "arguments": values.encode(list(test.call.arguments))}
    )
    return {"stdin": test.stdin, "call": call}


def a_test_from(data: dict[str, Any]) -> Test:
    call = data.get("call")
    made = (
        None if call is None else Call(_is(call["function"], str), tuple(_is(values.decode(call["arguments"]), list)))
    )
    return Test(_is(data["stdin"], str), made)


def limits_from(data: dict[str, Any]) -> Limits:
    return Limits(**data)


def checks_from(data: dict[str, Any]) -> Checks:
    tests = tuple(_is(test, str) for test in data["tests"])
    return Checks(tests, _is(data["setup"], str), None if data["entry"] is None else _is(data["entry"], str))


def result_from(data: dict[str, Any]) -> Result:
    return Result(**data)


def check_result_from(data: dict[str, Any]) -> CheckResult:
    return CheckResult(**{**data, "passed": tuple(data["passed"]), "reasons": tuple(data["reasons"])})


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} should be a {kind.__name__}")
    return value
