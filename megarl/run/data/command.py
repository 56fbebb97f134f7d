"""Command line of ``megarl data``. Heavy imports happen when a command runs, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

IMPORT_EXPERTS, AWAITING, REWARD, TEACH = "import-experts", "awaiting", "reward", "teach"
"""First words after ``megarl data`` with files and overrides."""
WANTS = {
    IMPORT_EXPERTS: "a parquet, json or jsonl file of demonstrations, or run:DIR",
    AWAITING: "a jsonl file to write",
    REWARD: "a parquet or jsonl file with the rows of `megarl data awaiting` and their score",
    TEACH: "the directory of a run, or one parquet, json or jsonl file of demonstrations",
}
OF_TEACH = ("top_k=", "out=")
"""Words of ``teach`` that are no settings."""
SHOW, COUNT, SAMPLE, EXPORT, PRUNE, PAGE, TOKENS = "show", "count", "sample", "export", "prune", "page", "tokens"
LOOKS = {
    SHOW: "Print a group, or one of its trajectories: prompt, turns, rewards, ends, weights versions.",
    COUNT: "Print how many groups and trajectories a run has, with rewards.",
    SAMPLE: "Print some trajectories at random.",
    EXPORT: "Write trajectories (one row each) or expert rows as parquet or jsonl.",
    PRUNE: "Delete the trajectories of groups that the run no longer needs; without --yes only list them.",
    PAGE: "Write one HTML file with groups' responses side by side, token by token.",
    TOKENS: "Compare the trained tokens of each step with the stored ones; exit with status 1 if they differ.",
}
"""First words that read a run's data; the run's directory follows."""
DESCRIPTION = """Show, export and prune a run's data (docs/data.md), or write an experiment's rows.

`megarl data [overrides]` writes an experiment's generated rows (tasks, demonstrations, preferences) as parquet.
`megarl data import-experts SOURCE... [overrides]` adds expert rows to the store of the experiment's run; a source is \
a parquet, json or jsonl file of demonstrations, or run:DIR, another run's responses.
`megarl data awaiting FILE.jsonl [overrides]` writes the run's responses that await a reward, and `megarl data reward \
FILE... [overrides]` gives them the scores in such rows.
`megarl data teach RUN|FILE teachers.NAME.path=DIR [top_k=K] [out=FILE] [overrides]` adds a teacher's log-probs to \
a run's responses or demonstrations, for algorithm=sft with a divergence (docs/distillation.md).

Commands for a run's data (each has its own --help):
""" + "\n".join(f"  megarl data {name + ' RUN':<11} {text}" for name, text in LOOKS.items())
BY = ("kind", "step", "source", "state", "status", "end")
"""Values of ``--by``."""
GROUPS_OF_PAGE = 12

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``megarl data`` for first words outside of ``LOOKS``."""
    parser.add_argument(
        "overrides",
        nargs="*",
        help="hydra overrides, e.g. experiment=quickstart; or import-experts, awaiting, reward or teach with files",
    )
    parser.set_defaults(sources=[], what=None, look=None)
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="X",
        help="with import-experts and teach: least score of a run's responses (default 1; with teach all)",
    )


def read_words(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Split the words into command, files and overrides, if the first word is one of ``WANTS``."""
    if arguments.overrides and arguments.overrides[0] in WANTS:
        arguments.what, *words = arguments.overrides
        arguments.of_teach = {}
        if arguments.what == TEACH:
            own = [word for word in words if word.startswith(OF_TEACH)]
            arguments.of_teach = dict(word.split("=", 1) for word in own)
            words = [word for word in words if word not in own]
        arguments.sources, arguments.overrides = separated(words)
        if not arguments.sources or (arguments.what in (AWAITING, TEACH) and len(arguments.sources) > 1):
            parser.error(f"{arguments.what}: give {WANTS[arguments.what]}")


def separated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into names of files or runs and overrides."""
    names = [word for word in words if "=" not in word or os.path.exists(word)]
    return names, [word for word in words if word not in names]


def look(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse one of ``LOOKS`` with ``RUN [filters] [options]``; None if the first word is another one."""
    if not words or words[0] not in LOOKS:
        return None
    name, *rest = words
    parser = argparse.ArgumentParser(prog=f"megarl data {name}", description=f"{LOOKS[name]} See docs/data.md.")
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, e.g. runs/quickstart")
    if name == SHOW:
        parser.add_argument("name", metavar="GROUP|TRAJECTORY", help="e.g. train-000003/5 or 'train-000003/5[2]'")
        parser.add_argument("--tokens", action="store_true", help="print each token with log-prob and weights version")
    elif name != TOKENS:
        parser.add_argument(
            "filters", nargs="*", metavar="FILTER", help="steps=3-10 reward=0..0.5 end=truncated source=NAME kind=train"
        )
    if name == COUNT:
        parser.add_argument("--by", choices=BY, default="kind", help="one row for each (default %(default)s)")
    if name == SAMPLE:
        parser.add_argument(
            "-n", type=_positive, default=3, metavar="N", help="number of trajectories (default %(default)s)"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default %(default)s)")
    if name == EXPORT:
        parser.add_argument("-o", "--output", required=True, metavar="FILE", help="FILE.parquet or FILE.jsonl")
    if name == PRUNE:
        parser.add_argument("--yes", action="store_true", help="delete them")
    if name == PAGE:
        parser.add_argument("-o", "--output", metavar="FILE", help="default: RUN/report/data.html")
        parser.add_argument(
            "--groups",
            type=_positive,
            default=GROUPS_OF_PAGE,
            metavar="N",
            help="the last N groups that match (default %(default)s)",
        )
    arguments, further = parser.parse_known_args(rest)  # filters may also follow an option
    if further and (name in (SHOW, TOKENS) or any(word.startswith("-") for word in further)):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if further:
        arguments.filters += further
    arguments.command, arguments.look = "data", name
    return arguments


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run ``megarl data``; return its exit status. Raises ConfigError and DataError."""
    if arguments.look == TOKENS:
        return _tokens(arguments)
    if arguments.look is not None:
        ACTIONS[arguments.look](arguments)
    else:
        _of_experiment(arguments)
    return 0


def _of_experiment(arguments: argparse.Namespace) -> None:
    from megarl.config import compose
    from megarl.run.run_dir.prepare import prepare_data

    if arguments.what == TEACH:
        from pathlib import Path

        from megarl.run.data.teach import teach

        given = {"min_score": arguments.min_score, "own": arguments.config_dir, **arguments.of_teach}
        log.info("%s: %d rows with scores", *teach(Path(arguments.sources[0]), arguments.overrides, **given))
        return
    config = compose(arguments.overrides, own=arguments.config_dir)
    if arguments.what is None:
        prepare_data(config, verbose=True)
    elif arguments.what == IMPORT_EXPERTS:
        from megarl.run.launch.records import import_experts

        import_experts(config, arguments.sources, 1.0 if arguments.min_score is None else arguments.min_score)
    else:
        from megarl.run.launch.records import give_rewards, write_awaiting_rows

        if arguments.what == AWAITING:
            write_awaiting_rows(config, arguments.sources[0])
        else:
            give_rewards(config, arguments.sources)


def _show(arguments: argparse.Namespace) -> None:
    from megarl.buffer.store import Selection
    from megarl.run.data.open_run import stored_run
    from megarl.run.data.show import show

    with stored_run(arguments.run_dir, Selection()) as opened:
        sys.stdout.write(show(opened, arguments.name, tokens=arguments.tokens))


def _count(arguments: argparse.Namespace) -> None:
    from megarl.run.data.filters import selection_of
    from megarl.run.data.open_run import count, count_experts, stored_run

    selection, experts = selection_of(arguments.filters, experts=True)
    with stored_run(arguments.run_dir, selection) as opened:
        sys.stdout.write(count_experts(opened.store) if experts else count(opened, selection, arguments.by))


def _sample(arguments: argparse.Namespace) -> None:
    from megarl.run.data.filters import selection_of
    from megarl.run.data.open_run import stored_run
    from megarl.run.data.show import sample

    selection, _ = selection_of(arguments.filters)
    with stored_run(arguments.run_dir, selection) as opened:
        sys.stdout.write(sample(opened, selection, arguments.n, arguments.seed) or "no trajectory matches\n")


def _export(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from megarl.run.data.export import export, export_experts
    from megarl.run.data.filters import selection_of
    from megarl.run.data.open_run import stored_run

    selection, experts = selection_of(arguments.filters, experts=True)
    path = Path(arguments.output)
    with stored_run(arguments.run_dir, selection) as opened:
        number = export_experts(opened.store, path) if experts else export(opened, selection, path)
    log.info("%s: %d %s", path, number, "expert rows" if experts else "trajectories")


def _prune(arguments: argparse.Namespace) -> None:
    from megarl.run.data.export import prune
    from megarl.run.data.filters import selection_of
    from megarl.run.data.open_run import stored_run

    selection, _ = selection_of(arguments.filters)
    with stored_run(arguments.run_dir, selection, read_only=not arguments.yes) as opened:
        found = prune(opened, selection, delete=arguments.yes)
    sys.stdout.write(found.text(done=arguments.yes))
    if found.tallies and not arguments.yes:
        log.info("nothing was deleted; repeat the command with --yes")


def _page(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from megarl.run.data.filters import selection_of
    from megarl.run.data.open_run import stored_run
    from megarl.run.data.page import write_page

    selection, _ = selection_of(arguments.filters)
    path = Path(arguments.output or Path(arguments.run_dir) / "report" / "data.html")
    with stored_run(arguments.run_dir, selection) as opened:
        log.info("%s", write_page(opened, selection, path, arguments.groups, arguments.filters))


def _tokens(arguments: argparse.Namespace) -> int:
    from megarl.buffer.store import Selection
    from megarl.run.data.open_run import stored_run
    from megarl.run.data.trained_tokens import count_trained

    with stored_run(arguments.run_dir, Selection()) as opened:
        found = count_trained(opened)
    sys.stdout.write(found.text())
    return int(found.wrong)


ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    SHOW: _show,
    COUNT: _count,
    SAMPLE: _sample,
    EXPORT: _export,
    PRUNE: _prune,
    PAGE: _page,
}
