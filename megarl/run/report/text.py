"""Texts and numbers of the report, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

from megarl.config.schema import EvaluationConfig
from megarl.run.report import excluded, offline
from megarl.run.report.data import Answer, EvaluationResult, ReportData, load

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
    if (left_out := excluded.line(run)) is not None:
        lines.append(left_out)
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
    for label, path in ((run.curve, run.curve_file), ("report", run_dir / "report" / "report.html")):
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


def status(run: ReportData) -> str:
    took = f" in {duration(run.wall_s)}" if run.wall_s else ""
    if run.finished:
        return f"finished: {run.steps_done} steps{took}"
    return f"not finished: {run.steps_done} of {run.config.trainer.steps} steps{took}; the same command resumes it"


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
