"""Does each algorithm learn? All of them on the quickstart's task, from one warm-started model, beside a run with
learning rate 0.

Accuracy is that of greedy answers to the 500 held-out tasks by plain transformers, from the HF checkpoint that a run
exports: one measure for runs with and without rollouts. A control is a short run of the same algorithm with the actor's
    learning rate at 0: the
weights that it exports must be those it began with, bit for bit.

Repeat the command to resume: finished runs are kept in ``runs/learning/``, an unfinished one goes on from its
checkpoint. The table is written after every run. What cannot run yet is listed as pending with its reason.

    python benchmarks/learning.py [--only grpo ppo] [--steps N] [--out docs/learning.md] [hydra overrides]

About two hours on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
from tqdm import tqdm

CONTROL_STEPS = 3
HELD_OUT = "correct"
PAIRS = "preferred"


@dataclass(frozen=True)
class Row:
    """A line of the table: what is set beyond the experiment and the preset, and why."""

    why: str
    settings: tuple[str, ...] = ()
    seeds: int = 1
    experiment: str = "quickstart"
    preset: str | None = None
    """None: the row's name."""
    measure: str = HELD_OUT
    """``preferred`` counts held-out pairs whose right answer has the higher score, as the run itself measures it."""


ROWS: dict[str, Row] = {
    "grpo": Row("the quickstart as it is", seeds=3),
    "grpo_ahead": Row(
        "grpo, sampled up to two steps ahead in completion order, with weights that change in flight",
        (
            "sync.max_staleness=2",
            "sync.order=completion",
            "sync.pause=keep",
            "rollout.segment_tokens=2",
            "algorithm.correction=truncate",
        ),
        seeds=3,
        preset="grpo",
    ),
    "grpo_partial": Row(
        "grpo in partial rollouts of two tokens from each weights, up to two steps ahead",
        (
            "sync.max_staleness=2",
            "rollout.segment_tokens=1",
            "rollout.budget_tokens=2",
            "algorithm.correction=truncate",
        ),
        seeds=3,
        preset="grpo",
    ),
    "ppo": Row(
        "the KL is in the rewards, where it adds up over an answer; the critic is as small as the actor and learns "
        "from nothing",
        ("algorithm.kl.coef=0.05", "critic.optimizer.lr=5.0e-4", "critic.warmup_steps=5"),
        seeds=3,
    ),
    "dpo": Row(
        "pairs: the right sum before a wrong one that is near", ("algorithm.beta=0.1",), seeds=3, experiment="dpo"
    ),
    "mix": Row("a fifth of the rows are right answers, with a tenth of the loss", seeds=3),
    "opmd": Row("advantages are not divided by the std, and the loss by 1 + tau", ("algorithm.kl.coef=0.05",), seeds=3),
    "opmd_pairwise": Row("as opmd", ("algorithm.kl.coef=0.05",)),
    "dr_grpo": Row("advantages are not divided by the std", ("algorithm.kl.coef=0.1",)),
    "dapo": Row(
        "as in the paper without KL; rows a step as everywhere; the longest right answer has 5 tokens",
        (
            "algorithm.kl.coef=0.0",
            "trainer.tasks_per_step=32",
            "algorithm.max_extra_rollouts=4",
            "reward.overlong_buffer=2",
        ),
    ),
    "grpo_r1": Row("rows a step as everywhere", ("trainer.tasks_per_step=32",)),
    "decoupled_ppo": Row("rollouts are of the current weights here, so this is grpo with a weight near 1"),
    "rloo": Row("advantages are not divided by the std", ("algorithm.kl.coef=0.1",)),
    "remax": Row("the KL is in the rewards", ("algorithm.kl.coef=0.05",)),
    "reinforce_pp": Row("the KL is in the rewards", ("algorithm.kl.coef=0.05",)),
    "reinforce_pp_baseline": Row("advantages have variance 1, as grpo's"),
    "gspo": Row("its narrow clip range leaves little to a step's second update", ("trainer.optimizer.lr=1.0e-4",)),
    "cispo": Row("as grpo"),
    "kimi_mirror_descent": Row("tau pulls already", ("algorithm.kl.coef=0.05",)),
    "online_dpo": Row("beta pulls already", ("algorithm.kl.coef=0.0",)),
    "sft": Row("right answers, another 400 steps of what the careless teacher began", experiment="sft"),
    "ipo": Row("as dpo", experiment="dpo"),
    "reward_model": Row("from the same model with a head of zeros", experiment="reward_model", measure=PAIRS),
}
"""The one place where the benchmark's settings are chosen. The quickstart's own (lr 5e-5, two updates a step, kl.coef
0.2) hold where nothing else is said; Adam takes the scale of a loss away, but not that of its parts to each other, so a
smaller advantage needs a smaller pull to the reference."""

START = ("experiment=quickstart", "trainer.steps=1", "trainer.eval_interval=0")
"""The warm start that all runs share, and one step to end the job with."""


@dataclass(frozen=True)
class Cell:
    """One run: a row with a seed, or its control."""

    runs: Path
    row: str
    seed: int
    control: bool
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Other settings make another run, so a changed table never shows an old number."""
        kind = "control" if self.control else f"seed{self.seed}"
        return f"{self.row}-{kind}-{hashlib.sha256(json.dumps(self.overrides).encode()).hexdigest()[:8]}"

    @property
    def folder(self) -> Path:
        return self.runs / self.name


def model_of(runs: Path) -> Path:
    """What the shared warm start left."""
    return runs / "start" / "reference"


def cells(runs: Path, names: Sequence[str], steps: int | None, extra: Sequence[str]) -> list[Cell]:
    """All runs of the table: first seeds of all rows and controls first, so that a table cut short says most."""
    found = []
    for name in names:
        row = ROWS[name]
        preset = row.preset or name
        common = [f"experiment={row.experiment}", f"algorithm={preset}", f"model.path={model_of(runs)}"]
        common += ["trainer.warm_start.steps=0", "taskset.warm_start=null", "trainer.eval_interval=0", *row.settings]
        for seed in range(1, row.seeds + 1):
            own = [f"trainer.seed={seed}", *([] if steps is None else [f"trainer.steps={steps}"])]
            found.append(Cell(runs, name, seed, False, jobs.last_of_each([*common, *own, *extra])))
        still = ["trainer.optimizer.lr=0.0", f"trainer.steps={CONTROL_STEPS}"]
        still += (
            ["trainer.optimizer.min_lr=0.0"] if row.experiment in ("sft", "reward_model") else []
        )  # its end of the decay
        found.append(Cell(runs, name, 1, True, jobs.last_of_each([*common, "trainer.seed=1", *extra, *still])))
    return sorted(found, key=lambda cell: cell.seed)


def pending(cell: Cell) -> str | None:
    """Why a cell cannot run with this version of megarl, or None: its settings compose and its algorithm is there."""
    from megarl.config import compose
    from megarl.core.errors import ConfigError
    from megarl.learn import algorithms

    try:
        algorithms.get(compose([*cell.overrides, "run.dir=-"]).algorithm.name)
    except ConfigError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- running


def train(folder: Path, overrides: Sequence[str], bar: tqdm, label: str) -> float:
    """Return the seconds of ``jobs.train``; the bar follows its steps."""
    before = bar.n
    bar.set_postfix_str(label)
    return jobs.train(folder, overrides, lambda steps: bar.update(before + steps - bar.n))


def run(cell: Cell, start: Mapping[str, Any], bar: tqdm) -> dict[str, Any]:
    """A cell's result: from its file, or by running it. Raises RuntimeError when the run fails."""

    def make() -> dict[str, Any]:
        kind = "lr 0" if cell.control else f"seed {cell.seed}"
        resumed = (cell.folder / "resolved.json").is_file()
        seconds = train(cell.folder, cell.overrides, bar, f"{cell.row}, {kind}")
        found: dict[str, Any] = {"commit": commit(), "overrides": list(cell.overrides)}
        found |= {} if resumed else {"seconds": seconds}  # of a part of the run they would say nothing
        if cell.control:
            found["same"] = same_weights(model_of(cell.runs), cell.folder / "hf")
        elif ROWS[cell.row].measure == PAIRS:
            found |= pair_accuracies(cell.folder)
        else:
            found |= {"before": start["accuracy"], "after": accuracy(cell.runs, cell.folder / "hf")}
        return found

    return jobs.kept(cell.folder / "result.json", make)


def warm_started(runs: Path, overrides: Sequence[str], bar: tqdm) -> dict[str, Any]:
    """The model that all runs begin with, and its accuracy."""

    def make() -> dict[str, Any]:
        seconds = train(runs / "start", overrides, bar, "the warm start that all share")
        found = accuracy(runs, model_of(runs))
        return {"seconds": seconds, "accuracy": found, "commit": commit(), "overrides": list(overrides)}

    record = jobs.kept(runs / "start" / "result.json", make)
    if record["overrides"] != list(overrides):
        raise SystemExit(f"{runs / 'start'} was made with {record['overrides']}; remove {runs} to begin again")
    return record


def accuracy(runs: Path, model_dir: Path) -> float:
    """Share of held-out tasks whose greedy answer by transformers is right."""
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.rewards import compute_score
    from megarl.tasks import ChatTokenizer, read_rows

    rows = read_rows(runs / "start" / "data" / "eval.parquet")
    tokenizer = ChatTokenizer.open(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    right = 0
    for same in by_length([tokenizer.prompt_ids(row.prompt) for row in rows]):
        prompts = torch.tensor([ids.tolist() for _, ids in same])
        with torch.no_grad():
            answers = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=8,
                do_sample=False,
                pad_token_id=tokenizer.eos_ids[0],
            )
        for (i, _), answer in zip(same, answers[:, prompts.shape[1] :].tolist(), strict=True):
            end = next((n for n, token in enumerate(answer) if token in tokenizer.eos_ids), len(answer))
            found = compute_score(
                rows[i].data_source, tokenizer.decode(answer[:end]), rows[i].ground_truth, rows[i].extra_info
            )
            right += found["score"] >= 1.0
    return right / len(rows)


def by_length(prompts: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
    """(index, ids) of prompts of the same length together: nothing is padded."""
    for length in sorted({len(ids) for ids in prompts}):
        yield [(i, ids) for i, ids in enumerate(prompts) if len(ids) == length]


def pair_accuracies(folder: Path) -> dict[str, float]:
    """Before and after, as an offline run records them for held-out pairs."""
    from megarl.buffer.store import Store
    from megarl.config import load_resolved

    store = Store(load_resolved(folder / "resolved.json").store.url)
    events = {event["data"]["rollout_id"]: event["data"] for event in store.journal.events("evaluation")}
    store.close()
    return {"before": events["eval-before"]["accuracy"], "after": events["eval-after"]["accuracy"]}


def same_weights(first: Path, second: Path) -> bool:
    """Whether all tensors that the first checkpoint has are in the second, bit for bit; a head may differ in kind."""
    mine, other = _tensors(first), _tensors(second)
    heads = {"lm_head.weight", "score.weight"}
    return mine.keys() - heads == other.keys() - heads and all(
        mine[name] == other[name] for name in mine.keys() & other.keys()
    )


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    import torch
    from safetensors.torch import load_file

    found = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    return {
        name: (str(t.dtype), tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in found.items()
    }


# ---------------------------------------------------------------- writing


def commit() -> str:
    text = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=jobs.ROOT, capture_output=True, text=True
    ).stdout
    return text.strip() or "unknown"


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), no GPU"


def table(
    names: Sequence[str], start: Mapping[str, Any], results: Mapping[tuple[str, int, bool], dict[str, Any]]
) -> str:
    """Markdown. A result has ``before`` and ``after``, or ``same`` (a control), or ``pending`` or ``failed`` with a
    reason."""
    lines = [
        "| algorithm | held-out, before → after | mean change | learning rate 0 | minutes a run |",
        "|---|---|---|---|---|",
    ]
    reasons, beyond = [], []
    for name in names:
        row = ROWS[name]
        runs = [results.get((name, seed, False), {}) for seed in range(1, row.seeds + 1)]
        control = results.get((name, 1, True), {})
        done = [r for r in runs if "after" in r]
        change = f"{statistics.mean(r['after'] - r['before'] for r in done) * 100:+.1f} points" if done else ""
        seconds = [r["seconds"] for r in done if "seconds" in r]
        minutes = f"{statistics.mean(seconds) / 60:.1f}" if seconds else ""
        what = f" {row.measure}" if row.measure != HELD_OUT else ""
        if row.settings:
            settings = ", ".join(f"`{s.removeprefix('algorithm.')}`" for s in row.settings)
            beyond += textwrap.wrap(f"- `{name}`: {settings}", 120, subsequent_indent="  ", break_long_words=False)
        lines.append(
            f"| `{name}` | {'; '.join(map(_outcome, runs))}{what} | {change} | {_still(control)} | {minutes} |"
        )
        reasons += [f"- `{name}`: {r[kind]}" for r in [*runs, control] for kind in ("pending", "failed") if kind in r]
    lines += ["", "Settings beyond the preset:", "", *beyond]
    lines += [
        "",
        f"Start: {start['accuracy']:.1%} of the held-out tasks." if "accuracy" in start else "Start: not measured yet.",
    ]
    if reasons:
        lines += ["", "Pending or failed:", *dict.fromkeys(reasons)]
    lines += ["", "Why these settings:", *(f"- `{name}`: {ROWS[name].why}" for name in names)]
    return "\n".join(lines) + "\n"


def _outcome(result: Mapping[str, Any]) -> str:
    if "after" in result:
        return f"{result['before']:.1%} → {result['after']:.1%}"
    return next((kind for kind in ("pending", "failed") if kind in result), "not run yet")


def _still(result: Mapping[str, Any]) -> str:
    if "same" in result:
        return "same weights" if result["same"] else "**weights moved**"
    return next((kind for kind in ("pending", "failed") if kind in result), "not run yet")


def document(text: str, changed: Sequence[str], commits: Sequence[str], minutes: float, note: str) -> str:
    lines = [
        "# Does each algorithm learn?",
        "",
        f"`python benchmarks/learning.py{''.join(f' {a}' for a in changed)}`, commit "
        f"{', '.join(sorted(set(commits))) or commit()}, {machine()}; all runs together {minutes:.0f} "
        f"minutes. {note}".strip(),
        "",
        "The quickstart's task (sums and differences of two numbers, a 0.3M-parameter Qwen3), every algorithm from the "
        "same warm-started",
        "weights. Accuracy: greedy answers to 500 held-out tasks by plain transformers from the exported checkpoint "
        "(standard error up to",
        "2.2 points). Each `before → after` is one seed; seeds change the order of tasks and the samples. "
        "`preferred` is the share of",
        "held-out pairs whose right answer has the higher score. *Learning rate 0*: a short run that must export the "
        "weights it began with.",
        "",
        "These are checks that an algorithm learns, not a comparison of algorithms: one small task, few seeds, "
        "settings chosen once and not",
        "tuned.",
        "",
    ]
    return "\n".join(lines) + "\n" + text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), metavar="NAME", help=f"rows of the table: {', '.join(ROWS)}"
    )
    parser.add_argument("--steps", type=int, help="steps of every run (default: the experiment's)")
    parser.add_argument(
        "--warm-start-steps", type=int, help="of the start that all runs share (default: the experiment's)"
    )
    parser.add_argument(
        "--runs", type=Path, default=jobs.ROOT / "runs" / "learning", help="where runs are kept (default %(default)s)"
    )
    parser.add_argument("--note", default="", help="a sentence about how it was run, for the page's head")
    parser.add_argument("--out", type=Path, default=jobs.ROOT / "docs" / "learning.md")
    arguments, extra = parser.parse_known_args()
    names = arguments.only or list(ROWS)
    runs = arguments.runs.resolve()
    todo = cells(runs, names, arguments.steps, extra)
    results: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for cell in todo:
        if (reason := pending(cell)) is not None:
            results[cell.row, cell.seed, cell.control] = {"pending": reason}
    ready = [cell for cell in todo if (cell.row, cell.seed, cell.control) not in results]
    steps = {cell: _steps(cell) for cell in ready}
    start: dict[str, Any] = {}

    numbers = {"--steps": arguments.steps, "--warm-start-steps": arguments.warm_start_steps}
    changed = [f"--only {' '.join(arguments.only)}"] if arguments.only else []
    changed += [*(f"{option} {number}" for option, number in numbers.items() if number is not None), *extra]

    def write() -> None:
        seconds = sum(r.get("seconds", 0.0) for r in [*results.values(), start])
        commits = [r["commit"] for r in [*results.values(), start] if "commit" in r]
        arguments.out.write_text(document(table(names, start, results), changed, commits, seconds / 60, arguments.note))

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=1 + sum(steps.values()), unit="step", file=sys.stderr, disable=None) as bar:
        if ready:
            warm = (
                [] if arguments.warm_start_steps is None else [f"trainer.warm_start.steps={arguments.warm_start_steps}"]
            )
            start = warm_started(runs, jobs.last_of_each([*START, *warm, *extra]), bar)
        done = 1
        for cell in ready:
            bar.update(done - bar.n)
            key = (cell.row, cell.seed, cell.control)
            try:
                results[key] = run(cell, start, bar)
            except RuntimeError as error:
                results[key] = {"failed": str(error)}
                bar.write(f"{cell.name} failed: {error}")
            done += steps[cell]
            bar.update(done - bar.n)
            write()
    write()
    sys.stdout.write(table(names, start, results))
    sys.exit(any("failed" in result for result in results.values()))


def _steps(cell: Cell) -> int:
    from megarl.config import compose

    return compose([*cell.overrides, "run.dir=-"]).trainer.steps


if __name__ == "__main__":
    main()
