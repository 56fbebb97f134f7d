"""Metrics of a step's rewards: their parts, and the time of each verifier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.core.metrics import spread
from megarl.core.schema import Trajectory
from megarl.rewards.verdict import FAILURES


def part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``reward/parts/<part>``: the unweighted mean of each part over the answers with it."""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward.parts.items():
            parts[name].append(value)
    return {f"reward/parts/{name}": sum(values) / len(values) for name, values in sorted(parts.items())}


def verifier_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of each verifier over all answers it judged, dropped ones included: ``reward/<verifier>/`` +
    ``answers``, ``error``, ``timeout``, ``retries``, ``kills`` (numbers), ``seconds/…`` in the verifier and
    ``waited_s/…`` for a free worker (mean, max, min)."""
    metrics: dict[str, float] = {}
    answers: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        for answer in (trajectory, trajectory.greedy):
            if answer is not None and "reward" in answer.metadata:
                answers[answer.metadata["reward"]["verifier"] or "none"].append(answer)
    for verifier, found in sorted(answers.items()):
        records, at = [answer.metadata["reward"] for answer in found], f"reward/{verifier}"
        metrics[f"{at}/answers"] = float(len(found))
        for status in FAILURES:
            metrics[f"{at}/{status}"] = float(sum(answer.reward.status == status for answer in found))
        metrics[f"{at}/retries"] = float(sum(max(0, record["tries"] - 1) for record in records))
        metrics[f"{at}/kills"] = float(sum(record["kills"] for record in records))
        for name in ("seconds", "waited_s"):
            metrics |= spread(f"{at}/{name}", [record[name] for record in records])
    return metrics
