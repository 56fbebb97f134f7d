"""The report of a run as one self-contained HTML file, with its main curve as PNG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from megarl.core.durable import whole, write_text
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.metrics import COMMAND
from megarl.learn.memory.ledger import human
from megarl.learn.memory.phases import Phase
from megarl.run.report import offline, svg, text
from megarl.run.report.data import Answer, LoggedAlarm, ReportData, alarms_of, changed_settings, load
from megarl.run.report.goodput import CAUSES, account
from megarl.run.report.pieces import CSS, HATCH, PIECES, reward_png, share_axis
from megarl.run.report.svg import CONTAINER, WAITING, TimedPhase, last_start, rows, seconds_by_phase, seconds_by_step
from megarl.run.report.text import (
    VERDICTS,
    accuracy,
    asked,
    curve,
    curve_file,
    duration,
    is_graded,
    percent,
    points_gained,
    right,
    sampling,
    score,
    source_table,
    status,
    summary,
)

__all__ = ["page", "summary", "write_report"]

CHARTS = (
    ("Length of responses", "tokens", "response_length/mean"),
    ("KL to the reference", "", "actor/kl_loss"),
    ("Entropy", "nats", "actor/entropy"),
    ("Gradient norm", "", "actor/grad_norm"),
    ("Clipped tokens", "share", "actor/pg_clipfrac"),
    ("Engine − trainer log-prob, mean", "absolute", "training/rollout_logp_diff_mean"),
    ("Engine − trainer log-prob, largest", "absolute", "training/rollout_logp_diff_max"),
    ("Zero-variance groups", "share of trained groups", "rollout/zero_variance"),
    ("Tool calls of a trajectory", "mean", "tool_call_counts/mean"),
    ("Chosen answer preferred", "share of pairs", "rewards/accuracies"),
    ("Reward of chosen − rejected", "", "rewards/margins"),
    ("Tokens a second", "each device", "perf/throughput"),
)
"""(title, unit, metric under verl's name)"""
SHOWN_STEPS = 3
SHOWN_PROCESSES = 16
SHOWN_COLUMNS = 8
EXPLORER = (("generation", "generation_s"), ("reward", "reward_s"), ("both at the same time", "overlap_s"))


def write_report(run_dir: Path, outage_s: float = 0.0) -> Path:
    """Write ``report/report.html`` and ``reward_curve.png`` (offline jobs: ``loss_curve.png``) next to it. Return the
    HTML's path.

    The report of a stopped run has the finished steps. Waits up to ``outage_s`` for the store.

    Raises:
        ConfigError: ``run_dir`` is not a run directory.
    """
    run = load(run_dir, outage_s)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    with whole(curve_file(run)) as path:
        reward_png(run, path)
    write_text(folder / "report.html", page(run))
    return folder / "report.html"


def page(run: ReportData) -> str:
    """Return the whole report as HTML."""
    return str(
        PIECES.page(
            f"{run.config.run.name}: megarl report", Markup(CSS), Markup(HATCH), sections(run, alarms_of(run.run_dir))
        )
    )


def sections(run: ReportData, alarms: Sequence[LoggedAlarm]) -> list[Markup]:
    """Return the sections of the report. ``alarms``: of the run's logs (``alarms_of``)."""
    makers = (
        _curve,
        _accuracy,
        _charts,
        _excluded,
        _answers,
        _lanes,
        _start_up,
        _goodput,
        _phase_table,
        _prediction,
        _memory,
        _verifiers,
        _settings,
        _files,
    )
    return [_headline(run), _alarms(alarms), *(section(run) for section in makers)]


# ------------------------------------------------------------------- sections


def _headline(run: ReportData) -> Markup:
    before, after = percent(run.before), percent(run.after)
    if run.offline:
        preferences = bool(run.accuracies)
        head = (
            f"Held-out {'preferences' if preferences else 'loss'} "
            f"{offline.change(run, by_accuracy=preferences) or 'not measured yet'}"
        )
    elif run.after is not None and run.after.accuracy is not None:
        head = f"Held-out accuracy {before} → {after}"
    elif len(run.accuracies) > 1:
        (_, first), (step, last) = run.accuracies[0], run.accuracies[-1]
        head = f"Held-out accuracy {first:.1%} → {last:.1%} after step {step}"
    elif run.before is not None and run.before.accuracy is not None:
        head = f"Held-out accuracy {before} before training"
    else:
        head = "No held-out accuracy yet"
    rewards = run.series("critic/rewards/mean")
    gain = points_gained(run)
    tiles = [
        ("accuracy gained", "—" if gain is None else f"{gain:+.1f} points"),
        ("steps", f"{run.steps_done} of {run.config.trainer.steps}"),
        ("wall time", duration(run.wall_s) if run.wall_s else "—"),
        ("mean reward, last step", svg.number(rewards[-1][1]) if rewards else "—"),
    ]
    if run.offline:
        tiles = [
            *tiles[1:3],
            ("held-out loss", offline.change(run, by_accuracy=False) or "—"),
            ("held-out rows", str(run.held_out)),
        ]
    name = f"{run.config.run.name} · {run.config.algorithm.name}"
    return PIECES.headline(name, head, status(run), run.notes, tiles)


def _alarms(alarms: Sequence[LoggedAlarm]) -> Markup:
    """Return the table of alarms, the last one of each name."""
    if not alarms:
        return Markup()
    body = [(alarm.name, alarm.count, PIECES.text(alarm.text)) for alarm in alarms]
    table = PIECES.table(("alarm", "times", "the last time"), body, numeric=(1,))
    return PIECES.section("Alarms", "Each says what to look at (docs/alarms.md).", PIECES.card(table))


def _curve(run: ReportData) -> Markup:
    if run.offline:
        return PIECES.section(
            "Loss",
            "Of each step; diamonds: of the held-out rows.",
            PIECES.card(Markup(offline.charts(run)), scroll=True),
        )
    rewards = run.series("critic/rewards/mean")
    shared = share_axis(rewards)
    markers = svg.Markers("held-out accuracy", run.accuracies) if run.accuracies else None
    if not rewards and not markers:
        return PIECES.section("Reward", "No step and no evaluation has been recorded yet.")
    big = {"width": 1060, "height": 290}
    drawn = (
        svg.line_chart("Mean reward", rewards, markers=markers if shared else None, zero=shared, **big)
        if rewards
        else ""
    )
    if markers and not (rewards and shared):
        drawn += svg.line_chart("Held-out accuracy", (), markers=markers, zero=True, **big)
    width = svg.window(len(rewards))
    text = f"Mean over a step’s samples{f'; thick: running mean of {width} steps' if width > 1 else ''}."
    text += f" Diamonds: accuracy on the held-out tasks, {sampling(run.config.evaluation)}." if markers else ""
    return PIECES.section("Reward", text, PIECES.card(Markup(drawn), scroll=True))


def _accuracy(run: ReportData) -> Markup:
    if run.offline:
        text = f"{run.held_out} held-out rows, whose questions no training row asks."
        head, *lines = offline.table(run)
        return PIECES.section("Before and after", text, PIECES.card(PIECES.table(head, lines)))
    body = []
    for label, evaluation in (("before", run.before), ("after", run.after)):
        s = evaluation.statuses if evaluation else {}
        faults = s.get("error", 0) + s.get("timeout", 0) if s else "—"
        length = f"{evaluation.mean_length:.1f}" if evaluation and evaluation.mean_length is not None else "—"
        step = "—" if evaluation is None or evaluation.step is None else evaluation.step
        graded = (score(evaluation),) if is_graded(run) else ()
        figures = (accuracy(evaluation), right(evaluation), asked(run, evaluation))
        body.append((label, step, *figures, *graded, faults, length))
    how = sampling(run.config.evaluation)
    text = (
        f"{how.capitalize()}{' answers' if how == 'greedy' else ''} to held-out tasks, whose questions are in no "
        "training row; ± one standard error."
    )
    one_answer = run.config.evaluation.samples == 1
    if one_answer and run.after is not None and run.after.statuses and run.before is not None and run.before.statuses:
        text += f" {run.learned} tasks went from wrong to right, {run.unlearned} from right to wrong."
    more = ("mean score",) if is_graded(run) else ()
    head = (
        "",
        "after step",
        "accuracy",
        "right",
        "tasks" if one_answer else "answers",
        *more,
        "no verdict",
        "mean tokens",
    )
    cards = PIECES.card(PIECES.table(head, body))
    if by_source := source_table(run):
        cards += PIECES.card(PIECES.table(("source", "tasks", "accuracy before", "after"), by_source))
    return PIECES.section("Accuracy before and after", text, cards)


def _charts(run: ReportData) -> Markup:
    loss = [(step, metrics["sft/loss"]) for step, metrics in run.warm_start if "sft/loss" in metrics]
    known = [("Warm start: loss", "supervised", "sft/loss", loss), *((*c, run.series(c[2])) for c in CHARTS)]
    cards = []
    for title, unit, metric, points in known:
        if points:
            drawn = Markup(svg.line_chart(f"{title}, {unit}" if unit else title, points))
            cards.append(PIECES.chart(title, metric, unit, points[-1][1], drawn))
    body = PIECES.charts(cards) if cards else Markup()
    if by_step := seconds_by_step(run.timelines.get("trainer_0", ())):
        order = _ordered({name for seconds in by_step.values() for name in seconds})
        drawn = Markup(svg.stacked_chart("Seconds per phase", by_step, order, width=1060, height=230))
        body += PIECES.card(PIECES.titled("Seconds per phase, trainer rank 0", drawn) + _legend(order), scroll=True)
    return PIECES.section("Curves", "Over training steps; the number is the last step’s.", body) if body else body


def _excluded(run: ReportData) -> Markup:
    """Return the table of excluded samples by reason, and the messages about dropped groups."""
    head, *body = text.table(run)
    if not body:
        return Markup()
    cards = PIECES.card(PIECES.table(head, body, numeric=range(2, len(head))))
    if run.dropped:
        rows = [(PIECES.text(message), steps) for message, steps in run.dropped]
        cards += PIECES.card(PIECES.table(("first message of its kind", "steps"), rows, numeric=(1,)))
    return PIECES.section("Left out of training", "Sampled by all steps, and in the loss of none.", cards)


def _answers(run: ReportData) -> Markup:
    if run.offline:
        return Markup()
    if not run.samples:
        return PIECES.section("Sample answers", "No held-out task has been answered yet.")
    head = ("", "question", "ground truth", "before", "after")
    body = [
        (i, *(PIECES.text(t) for t in (s.question, s.ground_truth)), _answer(s.before), _answer(s.after))
        for i, s in enumerate(run.samples, 1)
    ]
    text = (
        f"{len(run.samples)} of {run.held_out} held-out tasks, evenly spaced, chosen without regard to their answers."
    )
    return PIECES.section("Sample answers", text, PIECES.card(PIECES.table(head, body, numeric=())))


def _lanes(run: ReportData) -> Markup:
    timelines = dict(sorted(run.timelines.items(), key=lambda item: _process_order(item[0])))
    if not timelines:
        return Markup()
    steps = [p for p in next(iter(timelines.values())) if p.name == CONTAINER and p.step is not None][-SHOWN_STEPS:]
    everything = [p for phases in timelines.values() for p in phases]
    end = steps[-1].end if steps else max(p.end for p in everything)
    start = steps[0].start if steps else max(min(p.start for p in everything), end - 60)
    lanes = _between(timelines, start, end)[:SHOWN_PROCESSES]
    drawn = svg.lanes_chart(
        lanes, start, max(end, start + 1e-3), {s.step + 1: s.start for s in steps if s.step is not None}
    )
    shown = {phase.name for _, rs in lanes for r in rs for phase in r}
    what = f"The last {len(steps)} steps" if len(steps) > 1 else "The last step" if steps else "The last minute"
    more = f" The first {SHOWN_PROCESSES} of {len(timelines)} processes." if len(timelines) > SHOWN_PROCESSES else ""
    text = f"{what}; each process has a lane. Hatched: a trainer rank waits for explorer and engines.{more}"
    return PIECES.section("Timeline", text, PIECES.card(Markup(drawn) + _legend(_ordered(shown)), scroll=True))


def _between(
    timelines: Mapping[str, Sequence[TimedPhase]], start: float, end: float
) -> list[tuple[str, list[list[TimedPhase]]]]:
    """Return the rows of each process's phases that overlap a time span."""
    return [
        (name, rows(name, [p for p in phases if p.end > start and p.start < end])) for name, phases in timelines.items()
    ]


def _start_up(run: ReportData) -> Markup:
    """Return the timeline of the last start: each process's phases until the engines had joined."""
    timelines = dict(sorted(run.timelines.items(), key=lambda item: _process_order(item[0])))
    found = last_start(timelines)
    if found is None:
        return Markup()
    start, end = found
    lanes = [(name, found) for name, found in _between(timelines, start, end) if any(found)][:SHOWN_PROCESSES]
    lanes.sort(key=lambda lane: lane[0] != COMMAND)
    shown = {phase.name for _, rs in lanes for r in rs for phase in r}
    drawn = Markup(svg.lanes_chart(lanes, start, end, {}))
    text = f"The last start, {end - start:.1f} s from the command until the engines had joined the trainer."
    return PIECES.section("Start", text, PIECES.card(drawn + _legend(_ordered(shown)), scroll=True))


def _goodput(run: ReportData) -> Markup:
    """Return the table of the wall time's causes."""
    spent = account(run.timelines, run.steps_done, running=run.running)
    if spent is None:
        return Markup()
    body: list[tuple[str, ...]] = [
        (cause, CAUSES[cause], f"{seconds:.1f}", f"{seconds / spent.wall_s:.1%}")
        for cause, seconds in spent.seconds.items()
    ]
    body.append(("all", "", f"{spent.wall_s:.1f}", ""))
    text = f"{spent.goodput:.1%} of {duration(spent.wall_s)} since the first start are in steps that are kept."
    table = PIECES.table(("cause", "meaning", "seconds", "share"), body, numeric=(2, 3))
    return PIECES.section("Goodput", text, PIECES.card(table))


def _phase_table(run: ReportData) -> Markup:
    if not run.timelines:
        return Markup()
    wall = run.wall_s or 1.0
    processes = sorted(run.timelines, key=_process_order)[:SHOWN_COLUMNS]
    seconds = [seconds_by_phase(process, run.timelines[process]) for process in processes]
    body: list[tuple[Any, ...]] = []
    for name in dict.fromkeys(name for phases in seconds for name in phases):
        longest = max(phases.get(name, 0.0) for phases in seconds)
        bar = PIECES.bar(160 * min(1.0, longest / wall))
        label = f"{name} (waiting)" if name in WAITING else name
        body.append((label, *(f"{p[name]:.1f}" if name in p else "" for p in seconds), f"{longest / wall:.1%}", bar))
    idle = [
        wall - sum(p.values()) if kind_of(n) is ProcessKind.TRAINER else None
        for n, p in zip(processes, seconds, strict=True)
    ]
    body.append(("in no phase", *("" if rest is None else f"{max(rest, 0.0):.1f}" for rest in idle), "", ""))
    numeric = range(1, len(processes) + 2)
    table = PIECES.table(("phase", *processes, "share of wall time", ""), body, numeric=numeric)
    steps = len(seconds_by_step(run.timelines.get("trainer_0", ())))
    inside = [(name, [v for _, v in run.series(f"rollout/{key}")]) for name, key in EXPLORER]
    extra = Markup()
    if all(values for _, values in inside):
        means = ", ".join(f"{name} {sum(v) / len(v):.2f} s" for name, v in inside)
        extra = PIECES.paragraph(f"Inside a step’s rollout, mean by the explorer’s clock: {means}.")
    text = f"Whole run: {duration(run.wall_s)} from the first recorded phase to the last, {steps} steps."
    return PIECES.section(
        "Seconds per phase", f"{text} Time in nested phases counts for the innermost one.", PIECES.card(table) + extra
    )


def _prediction(run: ReportData) -> Markup:
    """Return the table of predicted and measured seconds of a step's phases."""
    if run.prediction is None:
        return Markup()
    half = run.steps[len(run.steps) // 2 :]
    body = []
    for phase, predicted in run.prediction["seconds"].items():
        values = [metrics[f"timing_s/{phase}"] for _, metrics in half if f"timing_s/{phase}" in metrics]
        if values:
            body.append((phase, f"{predicted:.3g}", f"{median(values):.3g}"))
    text = (
        f"Seconds of a step on {run.prediction['device']}, computed as `megarl plan` does with the run's lengths, "
        "and the median that the second half of its steps took (docs/planning.md)."
    )
    table = PIECES.table(("phase", "predicted", "measured"), body)
    return PIECES.section("Prediction", text, PIECES.card(table)) if body else Markup()


def _memory(run: ReportData) -> Markup:
    """Return the table of planned and measured bytes on rank 0's device in each phase of the last step."""
    last = run.steps[-1][1] if run.steps else {}
    body = [
        (phase, human(int(planned)), human(int(last[f"memory/{phase}/bytes"])))
        for phase in Phase
        if (planned := last.get(f"memory/{phase}/planned_bytes")) is not None
    ]
    if not body:
        return Markup()
    text = "On the device of trainer rank 0 as it entered a phase of the last step; on a CPU all of its memory."
    return PIECES.section("Memory by phase", text, PIECES.card(PIECES.table(("phase", "models", "measured"), body)))


def _verifiers(run: ReportData) -> Markup:
    """Return the table of calls and seconds of each verifier over all steps, and the parts of the rewards."""
    names = sorted({name for _, metrics in run.steps for name in metrics if name.startswith("reward/")})
    body: list[tuple[Any, ...]] = []
    for verifier in [name.split("/")[1] for name in names if name.endswith("/answers")]:

        def total(what: str, at: str = f"reward/{verifier}") -> float:
            return sum(value for _, value in run.series(f"{at}/{what}"))

        answers = total("answers")
        times: list[str] = []
        for name in ("seconds", "waited_s"):
            pairs = [
                (m[f"reward/{verifier}/{name}/mean"], m[f"reward/{verifier}/answers"])
                for _, m in run.steps
                if f"reward/{verifier}/{name}/mean" in m
            ]
            most = max(value for _, value in run.series(f"reward/{verifier}/{name}/max"))
            times += [f"{1000 * sum(mean * n for mean, n in pairs) / answers:.1f}", f"{1000 * most:.0f}"]
        body.append(
            (
                verifier,
                f"{answers:.0f}",
                *times,
                *(f"{total(what):.0f}" for what in ("error", "timeout", "retries", "kills")),
            )
        )
    if not body:
        return Markup()
    head = (
        "verifier",
        "answers",
        "ms, mean",
        "ms, largest",
        "ms waited, mean",
        "ms waited, largest",
        "errors",
        "timeouts",
        "retries",
        "workers killed",
    )
    parts = {
        name.removeprefix("reward/parts/"): run.series(name)[-1][1]
        for name in names
        if name.startswith("reward/parts/")
    }
    said = "; ".join(f"{name} {value:.3f}" for name, value in parts.items())
    note = PIECES.paragraph(f"Unweighted means of the reward's parts in the last step: {said}.") if parts else Markup()
    return PIECES.section(
        "Rewards", "Waited: time until a reward worker was free.", PIECES.card(PIECES.table(head, body)) + note
    )


def _settings(run: ReportData) -> Markup:
    body = [(name, _value(value), _value(default)) for name, default, value in changed_settings(run.config)]
    return PIECES.section(
        "Settings that differ from the defaults",
        "",
        PIECES.card(PIECES.table(("setting", "value", "default"), body, numeric=())),
    )


def _files(run: ReportData) -> Markup:
    body = [
        ("HF checkpoint", PIECES.code(str(run.hf_checkpoint)) if run.hf_checkpoint else "not exported yet"),
        ("run", PIECES.code(str(run.run_dir))),
        (curve(run), PIECES.link(curve_file(run).name)),
    ]
    return PIECES.section("Files", "", PIECES.card(PIECES.table(("", ""), body, numeric=())))


# --------------------------------------------------------------------- helpers


def _legend(names: Sequence[str]) -> Markup:
    return PIECES.legend([(svg.fill(name, waits=name in WAITING), name) for name in names])


def _ordered(names: Iterable[str]) -> list[str]:
    """Return the phases in the order of a step: known ones, unknown ones by name, then the rest of a step."""
    known = [name for name in svg.COLOURS if name != "other"]
    return sorted(names, key=lambda n: (n == "other", known.index(n) if n in known else len(known), n))


def _process_order(name: str) -> tuple[bool, str, int]:
    stem, _, rank = name.rpartition("_")
    return (
        (kind_of(name) is not ProcessKind.TRAINER, stem, int(rank))
        if rank.isascii() and rank.isdecimal()
        else (True, name, 0)
    )


def _answer(answer: Answer | None) -> Markup:
    return PIECES.soft("no answer") if answer is None else PIECES.answer(*VERDICTS[answer.status], answer.text)


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
