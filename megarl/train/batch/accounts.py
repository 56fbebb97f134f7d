"""Account of a step: every sample is trained or excluded for a named reason, in trajectories and in tokens.

Metrics of a step's trajectories: their scores, lengths and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from megarl.buffer.experience import Report
from megarl.core.metrics import spread
from megarl.core.schema import End, Outcome


@dataclass(frozen=True)
class Amount:
    """Number of trajectories, and of the tokens that engines sampled for them."""

    trajectories: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        """Add both numbers."""
        return Amount(self.trajectories + other.trajectories, self.tokens + other.tokens)


NONE = Amount()


class Excluded(dict[str, Amount]):
    """Reason -> excluded amount."""

    def add(self, reason: str, amount: Amount) -> None:
        """Add an amount to a reason; ignore an empty amount."""
        if amount != NONE:
            self[reason] = self.get(reason, NONE) + amount

    def merged(self, other: Mapping[str, Amount]) -> Excluded:
        """Return the sum of both."""
        found = Excluded(self)
        for reason, amount in other.items():
            found.add(reason, amount)
        return found


@dataclass(frozen=True)
class SampleAccount:
    """Amounts sampled for the groups of a step, including replayed ones, and excluded from training."""

    sampled: Amount
    excluded: Mapping[str, Amount]
    """Dropped groups, excluded members, greedy responses; ``metrics`` adds what the batch excludes."""

    def metrics(self, trained: Amount, more: Mapping[str, Amount]) -> dict[str, float]:
        """Return ``rollout/trajectories/*`` and ``rollout/tokens/*``.

        Args:
            trained: Amount in any update of the step.
            more: Amounts that the batch excludes, by reason.

        Raises:
            AssertionError: the numbers do not add up.
        """
        excluded = Excluded(self.excluded).merged(more)
        total = sum_of(excluded.values())
        if self.sampled != trained + total:
            raise AssertionError(f"{self.sampled} sampled, but {trained} trained and {dict(excluded)} excluded")
        amounts = {"sampled": self.sampled, "trained": trained, "excluded": total}
        amounts |= {f"excluded/{reason}": amount for reason, amount in excluded.items()}
        return {
            f"rollout/{unit}/{name}": float(number)
            for name, amount in amounts.items()
            for unit, number in asdict(amount).items()
        }


def sum_of(amounts: Iterable[Amount]) -> Amount:
    """Return the sum of amounts."""
    return sum(amounts, NONE)


def account_line(steps: Iterable[Mapping[str, float | None]]) -> str:
    """Format the account of a run's samples: sampled = trained + excluded, by reason."""
    totals: dict[str, dict[str, float]] = {"trajectories": {}, "tokens": {}}
    for metrics in steps:
        for name, value in metrics.items():
            _, unit, kind = (*name.split("/", 2), "", "")[:3]
            if name.startswith("rollout/") and unit in totals and kind:
                totals[unit][kind] = totals[unit].get(kind, 0.0) + (value or 0.0)
    return "; ".join(_unit_line(unit, found) for unit, found in totals.items() if found)


def _unit_line(unit: str, found: Mapping[str, float]) -> str:
    reasons = {name.partition("/")[2]: number for name, number in sorted(found.items()) if name.startswith("excluded/")}
    by_name = ", ".join(f"{reason} {number:,.0f}" for reason, number in reasons.items())
    equal = "=" if found["sampled"] == found["trained"] + found["excluded"] else "≠"
    total = f"{found['excluded']:,.0f} excluded" + (f" ({by_name})" if by_name else "")
    return f"{unit}: {found['sampled']:,.0f} sampled {equal} {found['trained']:,.0f} trained + {total}"


def trajectory_metrics(trajectories: list[Outcome], verified: Report) -> dict[str, float]:
    """Return metrics of scores, lengths and ends of a step's trajectories."""
    lengths = [float(e.response_length) for e in trajectories]
    scores = [e.reward.score for e in trajectories]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in trajectories])
    metrics |= spread("num_turns", [float(e.num_turns) for e in trajectories])
    if any(e.tool_calls is not None for e in trajectories):
        metrics |= spread("tool_call_counts", [float(e.tool_calls or 0) for e in trajectories])
    if groups := {e.group_id: e.group_stats.std for e in trajectories if e.group_stats and e.group_stats.size > 1}:
        metrics["rollout/zero_variance"] = sum(std == 0 for std in groups.values()) / len(groups)
    metrics["response_length/clip_ratio"] = sum(e.truncated for e in trajectories) / len(trajectories)
    metrics["training/accuracy"] = sum(e.reward.status == "ok" for e in trajectories) / len(trajectories)
    errors = sum(count for end, count in verified.ends.items() if End(end).by_reward)
    metrics["reward/error_rate"] = errors / max(1, sum(verified.ends.values()))
    metrics |= {f"ends/{end}": float(verified.ends.get(end, 0)) for end in End}
    metrics["reward/dropped_groups"] = float(verified.groups - verified.kept)
    metrics |= {f"buffer/excluded/{reason}": float(number) for reason, number in verified.excluded.items()}
    return metrics
