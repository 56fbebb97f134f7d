"""Requests and replies of the service as JSON, the same for both sides."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from typing import Any, get_args

from megarl.sandbox.inside import values
from megarl.sandbox.interface import Call, CheckResult, Checks, Limit, Limits, Result, Test

KEY_VARIABLE = "MEGARL_SANDBOX_KEY"
MAX_BODY_BYTES = 64 * 2**20
REQUEST_HEADER, SIGNATURE_HEADER = "Megarl-Request", "Megarl-Signature"
"""Headers: the client's random name of a request; in the reply, the ``signature`` of both."""


def key() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def signature(key: str, request: str, reply: bytes) -> str:
    """Return the signature that proves a reply complete, from the service and for this request."""
    return hmac.new(
        key.encode(), request.encode("utf-8", "surrogateescape") + b"\n" + reply, hashlib.sha256
    ).hexdigest()


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


def description_from(reply: Any) -> str:
    """Return the description in a reply. Raises LookupError, TypeError or ValueError for an invalid reply, as the
    functions below."""
    return str(_is(_is(reply, dict)["sandbox"], str))


def results_from(reply: Any) -> list[Result]:
    return [_result_from(item) for item in _is(_is(reply, dict)["results"], list)]


def _result_from(data: Any) -> Result:
    made = Result(**_is(data, dict))
    for value, kind in ((made.stdout, str), (made.stderr, str), (made.exit_code, int)):
        _is(value, kind)
    _is_text_or_none(made.value)
    _is_limit(made.limit)
    for seconds in (made.seconds, made.cpu_s):
        _is_time(seconds)
    return made


def check_result_from(reply: Any) -> CheckResult:
    data = _is(_is(reply, dict)["result"], dict)
    passed = tuple(_is(item, bool) for item in _is(data["passed"], list))
    reasons = tuple(_is(item, str) for item in _is(data["reasons"], list))
    if passed != tuple(not reason for reason in reasons):
        raise ValueError("the reasons are not those of the tests that failed")
    made = CheckResult(**{**data, "passed": passed, "reasons": reasons})
    _is_text_or_none(made.row_error)
    _is_limit(made.limit)
    _is(made.stderr, str)
    _is_time(made.seconds)
    return made


def _is_text_or_none(value: Any) -> None:
    if value is not None:
        _is(value, str)


def _is_limit(value: Any) -> None:
    if value is not None and value not in get_args(Limit):
        raise ValueError(f"{str(value)[:40]!r} is no limit")


def _is_time(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**40:
        raise TypeError(f"{str(value)[:40]!r} should be a time")


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{str(value)[:40]!r} should be of type {kind.__name__}")
    return value
