"""Table of samples that a run did not train on, by reason, for the report and the terminal."""

from __future__ import annotations

from typing import NamedTuple

from megarl.run.report.data import ReportData

EXCLUDED = "rollout/{}/excluded/"
MEANINGS = {
    "all_right": "group whose responses are all right: no gradient (algorithm.dynamic_sampling)",
    "all_wrong": "group whose responses are all wrong: no gradient (algorithm.dynamic_sampling)",
    "surplus": "group that dynamic sampling asked for, beyond trainer.tasks_per_step",
    "overlong": "truncated response (algorithm.overlong_filtering)",
    "segments": "tokens of earlier weights (algorithm.segments=current)",
    "unpaired": "in no preference pair",
    "greedy": "greedy response: a baseline, not a sample",
    "duplicate": "same text as an earlier member of its group (buffer.operators)",
    "incomplete": "group that lacks members",
    "invalid": "invalid trajectory or reward",
    "reward_error": "the verifier raised an error (reward.on_error)",
    "reward_timeout": "the verifier gave no verdict within reward.timeout_s (reward.on_error)",
    "reward_late": "the reward did not come in time",
    "workflow_error": "the workflow or the agent raised an exception",
    "workflow_timeout": "the workflow or the agent did not end in time",
    "tool_timeout": "a tool did not return in time (rollout.on_tool_timeout)",
    "abandoned": "the agent did not wait for a response that it had requested",
    "environment_error": "the environment raised an exception",
    "environment_timeout": "a call of the environment did not return in time",
    "teacher_error": "the teacher at a URL gave no valid log-probs",
    "teacher_timeout": "the teacher at a URL did not answer in time",
}
"""Reason -> meaning; reasons of users' operators are not included."""


class Reason(NamedTuple):
    """Trajectories and tokens that all steps excluded for one reason."""

    name: str
    trajectories: float
    share: float
    """Share of all sampled trajectories."""
    tokens: float
    token_share: float


def reasons(run: ReportData) -> list[Reason]:
    """Return the reasons, most tokens first."""
    trajectories, tokens = _totals(run, "trajectories"), _totals(run, "tokens")
    sampled, sampled_tokens = (
        sum(v for _, v in run.series(f"rollout/{unit}/sampled")) for unit in ("trajectories", "tokens")
    )
    found = [
        Reason(
            name,
            trajectories.get(name, 0.0),
            trajectories.get(name, 0.0) / max(sampled, 1.0),
            tokens.get(name, 0.0),
            tokens.get(name, 0.0) / max(sampled_tokens, 1.0),
        )
        for name in trajectories.keys() | tokens.keys()
    ]
    return sorted((one for one in found if one.trajectories or one.tokens), key=lambda one: (-one.tokens, one.name))


def line(run: ReportData) -> str | None:
    """Return one line for the terminal; None if nothing was excluded."""
    found = reasons(run)
    if not found:
        return None
    number, share = sum(one.trajectories for one in found), sum(one.share for one in found)
    by_name = ", ".join(f"{one.name} {one.trajectories:,.0f}" for one in found if one.trajectories)
    if not number:
        return f"left out of training: {sum(one.token_share for one in found):.1%} of the sampled tokens"
    return f"left out of training: {number:,.0f} of the sampled trajectories, {share:.1%} ({by_name})"


def table(run: ReportData) -> list[tuple[str, ...]]:
    """Return a header row and a row per reason."""
    rows: list[tuple[str, ...]] = [("reason", "meaning", "trajectories", "share", "tokens", "share of tokens")]
    return rows + [
        (
            one.name,
            MEANINGS.get(one.name, "reason given by an operator of the run"),
            f"{one.trajectories:,.0f}",
            f"{one.share:.1%}",
            f"{one.tokens:,.0f}",
            f"{one.token_share:.1%}",
        )
        for one in reasons(run)
    ]


def _totals(run: ReportData, unit: str) -> dict[str, float]:
    """Return reason -> amount over all steps."""
    found: dict[str, float] = {}
    start = EXCLUDED.format(unit)
    for _, metrics in run.steps:
        for name, value in metrics.items():
            if name.startswith(start):
                found[name.removeprefix(start)] = found.get(name.removeprefix(start), 0.0) + value
    return found
