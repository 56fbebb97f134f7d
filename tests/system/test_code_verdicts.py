"""Every code row format with right, wrong and broken answers, in the real sandbox."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from megarl.config.rewards import CodeConfig, RewardConfig
from megarl.core.schema import Task
from megarl.rewards import RewardPool, Verdict
from megarl.rewards import code as code
from megarl.rewards.verdict import to_verdict
from megarl.sandbox.local import LocalSandbox
from megarl.sandbox.selftest import local_sandbox
from tests.system.code_cases import ADD, CASES, SUM, block

pytestmark = pytest.mark.sandbox
CONFIG = CodeConfig(cpu_s=1, wall_s=10.0, item_s=60.0, memory_mib=512)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_verdict(case: tuple[Any, ...]) -> None:
    _, answer, truth, status, passed, total, *info = case
    result = code.make_scorer(local_sandbox(), CONFIG)(answer, truth, info[0] if info else None)
    assert result["status"] == status, result
    assert to_verdict(result)["status"] == status
    if status != "error":
        assert (result["passed"], result["total"]) == (passed, total), result
        assert result["score"] == float(status == "ok") and result["acc"] == (status == "ok")


def test_the_share_of_tests_is_a_score_by_option() -> None:
    config = CodeConfig(score="fraction", item_s=60.0)
    wrong = block("a, b = map(int, input().split())\nprint(a + b if a else 9)")
    result = code.make_scorer(local_sandbox(), config)(wrong, SUM, None)
    assert (result["score"], result["passed"], result["status"]) == (2 / 3, 2, "wrong")


@pytest.mark.parametrize("score", ["all", "fraction"])
def test_an_endless_loop_is_wrong_though_it_spends_the_time_of_all_tests(score: Any) -> None:
    """In the proportions of the defaults: the time of all is twice the CPU time of one."""
    config = CodeConfig(score=score, cpu_s=1, wall_s=2.0, item_s=3.0)
    result = code.make_scorer(local_sandbox(), config)(block("while True: pass"), SUM, None)
    assert (result["status"], result["passed"], result["total"]) == ("wrong", 0, 3), result
    result = code.make_scorer(local_sandbox(), config)(
        block("a, b = map(int, input().split())\nwhile a != 1: pass\nprint(a + b)"),
        {k: v * 2 for k, v in SUM.items()},
        None,
    )
    assert (
        result["status"] == "wrong"
        and 0 < result["passed"] < 3
        and result["score"] == (result["passed"] / 6 if score == "fraction" else 0)
    )


class Busy(LocalSandbox):
    """A sandbox whose starts take 4 s, as on a machine that is overloaded."""

    def open(self, limits: Any, passed: Any = None) -> Any:
        time.sleep(4.0)
        return super().open(limits, passed)


def test_a_program_that_spends_the_time_of_its_tests_is_wrong_and_a_sandbox_that_does_gives_no_verdict() -> None:
    config = CodeConfig(item_s=3.0, wall_s=5.0)
    slow = block("import time\ntime.sleep(1.6)\n" + ADD)
    result = code.make_scorer(local_sandbox(), config)(slow, SUM, None)
    assert result["status"] == "wrong" and "reward.code.item_s=3" in result["reason"]
    result = code.make_scorer(Busy(local_sandbox().host), config)(block(ADD), SUM, None)
    assert result["status"] == "timeout" and "reward.code.item_s=3" in result["reason"], result


SLOW = {"test_list": ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]}
SLEEP = "import time\ndef f(x):\n    time.sleep({})\n    return x"


@pytest.mark.parametrize(
    ("program", "times", "status", "passed"),
    [
        (SLEEP.format(1), {"wall_s": 2.9, "item_s": 20.0}, "ok", 3),  # 3 s of all tests together
        (SLEEP.format(1.6), {"wall_s": 3.0, "item_s": 3.1}, "wrong", None),  # none too slow by itself, all together
        (SLEEP.format("x == 2 and 60"), {"wall_s": 2.0, "item_s": 20.0}, "wrong", 1),
        (SLEEP.format(60), {"wall_s": 1.0, "item_s": 4.0}, "wrong", 0),
        ("import time\ntime.sleep(60)", {"wall_s": 1.0, "item_s": 20.0}, "wrong", 0),
        ("def f(x):\n    while x > 1: pass\n    return x", {"cpu_s": 1, "wall_s": 30.0, "item_s": 30.0}, "wrong", 1),
        (SLEEP.format(1.6).replace("return x", "return -x"), {"wall_s": 3.0, "item_s": 3.1}, "wrong", 0),
    ],
)
def test_each_assertion_has_a_time_of_its_own(
    program: str, times: dict[str, Any], status: str, passed: int | None
) -> None:
    result = code.make_scorer(local_sandbox(), CodeConfig(**times))(block(program), SLOW, None)
    assert result["status"] == status and result["total"] == 3, result
    assert passed is None or result["passed"] == passed, result


def test_tests_that_catch_everything_do_not_pass_when_their_time_is_over() -> None:
    row = {"test_list": ["try:\n    f(1)\nexcept:\n    pass", "assert True"]}
    result = code.make_scorer(local_sandbox(), CodeConfig(wall_s=0.5))(block(SLEEP.format(60)), row, None)
    assert (result["status"], result["passed"]) == ("wrong", 0) and "limit: wall" in result["reason"]


def test_many_tests_go_through_several_batches() -> None:
    row = {"inputs": [f"{i} {i}" for i in range(40)], "outputs": [str(2 * i) for i in range(40)]}
    result = code.make_scorer(local_sandbox(), CONFIG)(ADD, row, None)
    assert (result["status"], result["passed"]) == ("ok", 40)
    row["outputs"][30] = "x"
    result = code.make_scorer(local_sandbox(), CONFIG)(ADD, row, None)
    assert (result["status"], result["passed"]) == ("wrong", 30) and result["reason"] == "test 31: other output"


def test_the_pool_scores_programs_that_never_end_as_wrong() -> None:
    """Below ``reward.timeout_s``, whose timeout would drop the answer instead."""
    task = Task("t/0", "code", ({"role": "user", "content": "Add."},), "code", {"ground_truth": SUM})

    async def main() -> list[Verdict]:
        async with RewardPool(RewardConfig(timeout_s=60.0, code=CodeConfig(cpu_s=1, wall_s=20.0))) as pool:
            return [await pool.score(task, text) for text in (ADD, "while True: pass", ADD)]

    verdicts = asyncio.run(main())
    assert [verdict.reward.status for verdict in verdicts] == ["ok", "wrong", "ok"]
    assert verdicts[0].reward.parts == {"acc": 1.0, "passed": 3.0, "total": 3.0}


def test_the_router_scores_code_with_the_settings_it_is_given() -> None:
    from megarl.rewards import compute_score

    for source in (
        "code",
        "code/mine",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
        "mbpp",
        "humaneval",
        "livecodebench/v6",
    ):
        assert compute_score(source, ADD, SUM)["score"] == 1.0
