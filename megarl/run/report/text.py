"""Texts, tables and numbers of the report, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

from megarl.config.schema import EvaluationConfig
from megarl.run.report import offline
from megarl.run.report.data import Answer, EvaluationResult, ReportData, load
from megarl.run.report.goodput import account

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


def excluded_line(run: ReportData) -> str | None:
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


VERDICTS = {
    "ok": ("✓ right", "right"),
    "wrong": ("✗ wrong", "wrong"),
    "error": ("! reward error", "wrong"),
    "timeout": ("! reward timeout", "wrong"),
    "late": ("reward to come", "wrong"),
}


def summary(run_dir: Path, outage_s: float = 0.0) -> str:
    """Return the text for the terminal: accuracy and ten answers before and after training, paths of files. Waits up to
    ``outage_s`` for the run's store."""
    run = load(run_dir, outage_s)
    lines = [f"{run.config.run.name}: {status(run)}", ""]
    if run.offline:
        head, *table = offline.table(run)
        for label, _, *values in ((f"{run.held_out} held-out rows", *head[1:]), *table):
            lines.append(f"{label:<20}" + "".join(f"{value:>20}" for value in values))
    else:
        graded = is_graded(run)
        more = f"{'mean score':>12}" if graded else ""
        lines.append(f"{'held-out tasks':<16}{'accuracy':>10}{'right':>8}{'of':>8}{more}")
        for label, evaluation in (("before", run.before), ("after", run.after)):
            line = f"{label:<16}{percent(evaluation):>10}{right(evaluation):>8}{asked(run, evaluation):>8}"
            lines.append(f"{line}{score(evaluation):>12}" if graded else line)
    if by_source := source_table(run):
        lines += [
            f"  {source:<{max(len(row[0]) for row in by_source)}}  {before:>7} → {after:>7}{tasks:>8} tasks"
            for source, tasks, before, after in by_source
        ]
    if (gain := points_gained(run)) is not None:
        lines.append(f"{'change':<16}{gain:>+10.1f} points")
    if (left_out := excluded_line(run)) is not None:
        lines.append(left_out)
    if (spent := account(run.timelines, run.steps_done, running=run.running)) is not None:
        lines.append(spent.line())
    if run.samples:
        lines += ["", f"{len(run.samples)} sample answers:", ""]
        table = [("question", "truth", "before", "after")]
        same = _shared_start([s.question for s in run.samples])
        for s in run.samples:
            question = f"…{s.question[same:]}" if same else s.question
            table.append((_short(question, 44), _short(s.ground_truth, 16), _marked(s.before), _marked(s.after)))
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
    lines.append("")
    for label, path in ((curve(run), curve_file(run)), ("report", run_dir / "report" / "report.html")):
        lines.append(f"{label + ':':<15}{path if path.is_file() else 'not written yet'}")
    lines.append(f"{'HF checkpoint:':<15}{run.hf_checkpoint or 'not exported yet'}")
    if (best := run.best_checkpoint) is not None:
        lines.append(f"{'best:':<15}{best} (by {run.config.trainer.keep_best})")
    return "\n".join([*lines, *run.notes])


def source_table(run: ReportData) -> list[tuple[str, str, str, str]]:
    """Return (source, tasks, accuracy before, accuracy after) of held-out tasks; [] for a single source."""
    sides = [{} if side is None else side.sources for side in (run.before, run.after)]
    return [
        (source, str(tasks), *(f"{side[source][0]:.1%}" if source in side else "—" for side in sides))  # type: ignore[misc]
        for source, (_, tasks) in {**sides[0], **sides[1]}.items()
    ]


def is_graded(run: ReportData) -> bool:
    """Return True if an evaluation has scores other than 0 and 1."""
    return any(evaluation is not None and evaluation.score is not None for evaluation in (run.before, run.after))


def score(evaluation: EvaluationResult | None) -> str:
    return "—" if evaluation is None or evaluation.score is None else f"{evaluation.score:.3f}"


def percent(evaluation: EvaluationResult | None) -> str:
    return "—" if evaluation is None or evaluation.accuracy is None else f"{evaluation.accuracy:.1%}"


def accuracy(evaluation: EvaluationResult | None) -> str:
    """Return the accuracy with its standard error, and pass@k if tasks have several answers."""
    if evaluation is None or evaluation.accuracy is None:
        return "—"
    text = _with_error(evaluation.accuracy, evaluation.standard_error)
    if evaluation.passed is None:
        return text
    return (
        f"{text} (avg@{evaluation.samples}); pass@{evaluation.samples} "
        f"{_with_error(evaluation.passed, evaluation.passed_error)}"
    )


def _with_error(share: float, error: float | None) -> str:
    return f"{share:.1%}" + ("" if error is None else f" ± {100 * error:.1f}")


def sampling(config: EvaluationConfig) -> str:
    """Describe the sampling of held-out tasks, e.g. ``8 answers at temperature 0.6, top-p 0.95``."""
    if not config.temperature:
        return "greedy"
    kept = (f", top-p {config.top_p:g}" if config.top_p < 1 else "") + (
        f", top-k {config.top_k}" if config.top_k else ""
    )
    return f"{config.samples} answer{'s' if config.samples > 1 else ''} at temperature {config.temperature:g}{kept}"


def right(evaluation: EvaluationResult | None) -> str:
    return str(evaluation.statuses.get("ok", 0)) if evaluation and evaluation.statuses else "—"


def asked(run: ReportData, evaluation: EvaluationResult | None) -> str:
    answered = sum(evaluation.statuses.values()) if evaluation else 0
    expected = run.held_out * (evaluation.samples if evaluation else 1)
    return f"{answered}/{expected}" if 0 < answered < expected else str(expected or "—")


def points_gained(run: ReportData) -> float | None:
    """Return the gain in held-out accuracy, in percentage points."""
    if run.before is None or run.after is None or run.before.accuracy is None or run.after.accuracy is None:
        return None
    return 100 * (run.after.accuracy - run.before.accuracy)


def curve(run: ReportData) -> str:
    """Return the name of the main curve and of its file: ``loss curve`` or ``reward curve``."""
    return "loss curve" if run.offline else "reward curve"


def curve_file(run: ReportData) -> Path:
    """Return the path of the main curve's PNG."""
    return run.run_dir / "report" / f"{curve(run).replace(' ', '_')}.png"


def status(run: ReportData) -> str:
    """Return the state of a run, with its steps."""
    took = f" in {duration(run.wall_s)}" if run.wall_s else ""
    if run.finished:
        return f"finished: {run.steps_done} steps{took}"
    steps = f"{run.steps_done} of {run.config.trainer.steps} steps{took}"
    return f"running: {steps}" if run.running else f"not finished: {steps}; the same command resumes it"


def duration(seconds: float) -> str:
    """Return ``8 min 12 s``; with tenths below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def clean(text: str) -> str:
    """Replace control characters: a model's text must not control a terminal or break a page."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _shared_start(texts: Sequence[str]) -> int:
    """Return the length of the words that all texts begin with; 0 if it is short, or all texts are equal."""
    same = len(commonprefix(list(texts)).rpartition(" ")[0]) if len(set(texts)) > 1 else 0
    return same if same >= 20 else 0


def _short(text: str, limit: int) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _marked(answer: Answer | None) -> str:
    return "—" if answer is None else f"{VERDICTS[answer.status][0][0]} {_short(answer.text, 30)}"
