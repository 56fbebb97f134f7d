"""A test of the tests: faults that are put into megarl's source one at a time, and the tests that must then fail.

``python -m tests.mutants [words of names]`` puts each fault into a copy of the checkout and runs its tests there.
Status 1 where tests pass in spite of one. Weight syncs have a list of their own: ``tests/loop/sync_mutants.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from megarl import _C

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0
NOT_EDITABLE = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
"""
"""Code that a Python in the copy begins with: an editable install would import megarl from where it was installed."""


class Mutant(NamedTuple):
    """One fault."""

    name: str
    file: str
    """Below megarl/."""
    right: str
    """Text of the source, which occurs there once."""
    wrong: str
    tests: str
    """Paths below tests/ for pytest, with spaces between."""


MUTANTS = (
    # which groups a step may take
    Mutant("every step publishes", "buffer/order/pacing.py", "return step - step % self.interval", "return step",
           "unit/test_pacing.py unit/test_course.py"),
    Mutant("groups are asked for a step too far ahead", "buffer/order/pacing.py",
           "self.published(step) + self.max_staleness + 1", "self.published(step) + self.max_staleness + 2",
           "unit/test_pacing.py unit/test_course.py"),
    Mutant("a group may be a step too old", "buffer/order/pacing.py", "return published + self.max_staleness\n",
           "return published + self.max_staleness + 1\n", "unit/test_pacing.py unit/test_course.py"),
    Mutant("groups that are due find no place", "buffer/order/pacing.py", "all(room[j] > 0 for j in before)",
           "all(room[j] >= 0 for j in before)", "unit/test_pacing.py"),
    Mutant("a step publishes what its evaluation has published", "train/step.py",
           "published or self.publish(state)", "self.publish(state)", "unit/test_course.py"),
    Mutant("a step samples with the weights of the step before", "train/step.py",
           "        self.evaluated = None\n        if self.rank", "        if self.rank", "unit/test_course.py"),
    # states that nodes keep
    Mutant("a kept state loses the number of updates", "weights/checkpoint/training/kept_state.py",
           'group["step"] = step', "pass", "parallel/test_kept_state.py"),
    Mutant("a kept state loses the moments", "weights/checkpoint/training/kept_state.py",
           "                if name in tensors:\n", "                if name in tensors and 'exp_avg' not in name:\n",
           "parallel/test_kept_state.py"),
    Mutant("a kept state has the slot of the one before", "weights/checkpoint/training/kept_state.py",
           "{step % SLOTS}", "{0}", "parallel/test_kept_state.py"),
    Mutant("a rank keeps the copy of its own state", "weights/checkpoint/training/kept_state.py",
           "there = ranks[order[(order.index(node) + 1) % len(order)]]", "there = ranks[node]",
           "parallel/test_kept_state.py"),
    # advantages and losses
    Mutant("the standard deviation is not divided by", "learn/algorithms/group_relative.py",
           "STD_EPSILON if divide else 1.0", "STD_EPSILON if not divide else 1.0",
           "unit/test_algorithms_reference.py unit/test_algorithms.py"),
    Mutant("the standard deviation is biased", "buffer/experience/operators.py", "in values) / (len(values) - 1)",
           "in values) / len(values)", "unit/test_reward_pipeline.py unit/test_algorithms.py"),
    Mutant("clipping takes the better of two", "ops/policy.py", "torch.maximum(unbounded, bounded)",
           "torch.minimum(unbounded, bounded)", "unit/test_ops_policy.py"),
    Mutant("bounds of the ratio are exchanged", "ops/policy.py", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high))",
           "ratio.clamp(1.0 - clip_high, 1.0 + clip_low))", "unit/test_ops_policy.py"),
    Mutant("k3 has the wrong sign", "ops/policy.py", "torch.expm1(d) - d)", "torch.expm1(-d) + d)",
           "unit/test_ops_policy.py unit/test_algorithms_estimates.py"),
    Mutant("entropy is a penalty", "ops/policy.py", "total - entropy_coef * entropy_sum",
           "total + entropy_coef * entropy_sum", "unit/test_ops_policy.py"),
    Mutant("a sequence's ratio is a sum", "ops/policy.py", 'if importance == "sequence_mean" else total_ratio)[row]',
           'if importance != "sequence_mean" else total_ratio)[row]', "unit/test_ops_policy.py"),
    Mutant("GAE forgets the value", "ops/advantage.py", "gamma * next_value - v[t] + gamma",
           "gamma * next_value + gamma", "unit/test_ops_advantage.py"),
    Mutant("KL is added to rewards", "learn/algorithms/terms/token_rewards.py", "rewards -= each", "rewards += each",
           "unit/test_algorithms_estimates.py"),
    Mutant("the reward is a token early", "learn/algorithms/terms/token_rewards.py",
           "rewards[cu_seqlens[1:][there] - 1] +=", "rewards[cu_seqlens[:-1][there]] +=",
           "unit/test_algorithms_estimates.py"),
    Mutant("the critic's clipping takes the better of two", "learn/algorithms/token_returns.py",
           "torch.maximum(each, bounded)", "torch.minimum(each, bounded)",
           "unit/test_algorithms_estimates.py"),
    Mutant("DPO prefers what was rejected", "learn/algorithms/pairs.py", "masked(chosen - rejected, counted)",
           "masked(rejected - chosen, counted)", "unit/test_algorithms_pairs.py"),
    Mutant("the KL's coefficient runs away", "learn/algorithms/terms/token_rewards.py", "kl / config.target - 1.0",
           "1.0 - kl / config.target", "unit/test_algorithms_estimates.py unit/test_algorithms.py"),
    # weights
    Mutant("other weights under the same version", "train/sync/probe.py", "self._last[0] != version", "True",
           "unit/test_weight_sync.py"),
    Mutant("digests of a channel are not counted", "weights/reshard/execute.py",
           "(digests[key] + self.known[_key(slice_)]) % _MODULUS", "digests[key]", "unit/test_reshard_execute.py"),
    Mutant("a bucket's number is not sent", "weights/reshard/execute.py",
           "torch.tensor([bucket.number, bucket.channel.code], device", "torch.tensor([0, bucket.channel.code], device",
           "unit/test_reshard_execute.py"),
    # verdicts
    Mutant("the first answer counts", "rewards/answer/grammar.py",
           "max(found, key=lambda item: item[0])", "min(found, key=lambda item: item[0])",
           "unit/test_rewards_math.py"),
    Mutant("an echo of the question is an answer", "rewards/math/compare.py", "if _echo(second, question):",
           "if False:", "unit/test_rewards_math.py"),
    Mutant("brackets of an interval do not matter", "rewards/math/compare.py",
           'pred.kind == "tuple":\n        return gold.brackets == pred.brackets and _same',
           'pred.kind == "tuple":\n        return _same', "unit/test_rewards_math.py"),
    Mutant("programs may print fewer lines", "rewards/code.py", "return len(ours) == len(theirs) and",
           "return len(ours) <= len(theirs) and", "unit/test_rewards_code.py"),
    Mutant("True is 1", "rewards/code.py", "        return data is expected\n",
           "        return data == expected\n", "unit/test_rewards_code.py"),
    Mutant("a response of two forms has one", "rewards/verdict.py", "float(not outside.strip() and bool",
           "float(bool", "unit/test_rewards_shape.py"),
    Mutant("a long wrong answer is rewarded", "rewards/verdict.py", "min(0.0, term)", "max(0.0, term)",
           "unit/test_rewards_shape.py"),
    # what is checked before anything is trained
    Mutant("log-probs above 0 are trained on", "buffer/experience/operators.py",
           "if not float(bounds.logp) <= LARGEST_LOGP or math", "if math",
           "unit/test_reward_pipeline.py unit/test_trajectory.py"),
    Mutant("spans of older weights may follow", "buffer/experience/operators.py", "span.version < version:", "False:",
           "unit/test_reward_pipeline.py unit/test_trajectory.py"),
    Mutant("engines may sample anything", "train/update/gap.py", "difference.mean <= tolerance",
           "difference.mean <= 1e9", "unit/test_gap.py unit/test_step_samples.py"),
)  # fmt: skip


def faults(mutant: Mutant) -> str | None:
    """What is wrong with a row of the list; None where it fits the source."""
    path = ROOT / "megarl" / mutant.file
    count = path.read_text().count(mutant.right) if path.is_file() else 0
    if count != 1:
        return f"megarl/{mutant.file} has {mutant.right!r} {count} times, not once"
    missing = [name for name in mutant.tests.split() if not (ROOT / "tests" / name).is_file()]
    return f"no such tests: {missing}" if missing else None


def is_caught(mutant: Mutant, copy: Path) -> bool:
    """Return True if the tests fail with the fault in a copy of the checkout, which is as before then."""
    path = copy / "megarl" / mutant.file
    before = path.read_text()
    path.write_text(before.replace(mutant.right, mutant.wrong))
    try:
        tests = [f"tests/{name}" for name in mutant.tests.split()]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    finally:
        path.write_text(before)
    assert done.returncode in (0, 1), f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.returncode == 1


def copied(folder: Path) -> Path:
    """A copy of the checkout that Python imports in place of this one: what git tracks or would, and the extension."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    shutil.copy2(str(_C.__file__), folder / "megarl")
    (folder / "sitecustomize.py").write_text(NOT_EDITABLE)
    return folder


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    missed = []
    with tempfile.TemporaryDirectory(prefix="megarl-mutants-") as folder:
        copy = copied(Path(folder))
        for mutant in chosen:
            caught = is_caught(mutant, copy)
            sys.stdout.write(f"{'caught' if caught else 'MISSED'}  {mutant.name}\n")
            sys.stdout.flush()
            if not caught:
                missed.append(mutant.name)
    sys.stdout.write(f"{len(chosen) - len(missed)} of {len(chosen)} caught\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
