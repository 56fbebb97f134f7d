"""Metrics of a step's trajectories."""

from __future__ import annotations

from megarl.buffer.experience import Report
from megarl.core.metrics import spread
from megarl.core.schema import End, Outcome


def trajectory_metrics(trajectories: list[Outcome], verified: Report) -> dict[str, float]:
    """Scores, lengths and ends of a step's trajectories."""
    lengths = [float(e.response_length) for e in trajectories]
    scores = [e.reward.score for e in trajectories]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in trajectories])
    metrics["response_length/clip_ratio"] = sum(e.truncated for e in trajectories) / len(trajectories)
    metrics["training/accuracy"] = sum(e.reward.status == "ok" for e in trajectories) / len(trajectories)
    errors = sum(count for end, count in verified.ends.items() if End(end).by_reward)
    metrics["reward/error_rate"] = errors / max(1, sum(verified.ends.values()))
    metrics |= {f"ends/{end}": float(verified.ends.get(end, 0)) for end in End}
    metrics["reward/dropped_groups"] = float(verified.groups - verified.kept)
    metrics |= {f"buffer/excluded/{reason}": float(number) for reason, number in verified.excluded.items()}
    return metrics
