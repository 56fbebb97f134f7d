"""Hostile programs: each is stopped or not believed, leaves nothing behind, and the next item is judged as if it had
not been.

They run in one process under a guard of its own (``escape_runner``), never outside the sandbox.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.escape_runner import guarded
from tests.system.escapes import ESCAPES, Escape

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    found, said = guarded()
    assert found and found[-1]["name"] == "the host", (
        f"the runner did not end: {[r['name'] for r in found][-1:]} {said[-2000:]}"
    )
    return {report["name"]: report for report in found}


def test_there_are_enough_of_them_with_names_of_their_own() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 40


@pytest.mark.parametrize("escape", ESCAPES, ids=[escape.name for escape in ESCAPES])
def test_escape(escape: Escape, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[escape.name]
    verdict = report["verdict"]
    assert verdict["status"] == escape.status, verdict
    assert verdict["score"] == float(escape.status == "ok")
    assert escape.reason in verdict["reason"], verdict
    assert "parentheses" in escape.name or not any(
        slip in verdict["reason"] for slip in ("SyntaxError", "NameError")
    ), verdict
    assert report["next"] == ["ok", "ok"]
    assert report["alive"] == 0, "processes are left"


def test_the_host_is_unharmed(reports: dict[str, dict[str, Any]]) -> None:
    host = reports["the host"]
    assert host["alive"] == 0
    assert host["reached"] == [] and host["secret"] == "secret" and host["beside"] == ["secret"]
