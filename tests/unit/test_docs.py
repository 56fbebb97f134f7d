"""Pages name files, settings and commands that exist, link to pages that exist, and are all linked."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import cli
from megarl.config import compose
from megarl.config.schema import Config
from megarl.run.launch.sweep import combinations

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()
OTHERS = {
    "transformers/models/ernie4_5/modeling_ernie4_5.py",
    "vllm/model_executor/models/ernie45.py",
    "models/llava.py",
    "models/pixtral.py",
    "image_processing_qwen2_vl.py",
    "instruction.md",
    "solve.sh",
    "mine.yaml",
    "DIR/experiment/mine.yaml",
    "job.sh",
    "reward.py",
}
"""Files of other projects, and of a reader."""
NO_SETTINGS = {
    "algorithms.md": {"rollout.top_p", "rollout.top_k"},  # said not to exist
    "checkpoints.md": {"model.layers.61", "model.safetensors"},
    "environments.md": {"reward.txt"},
    "first_night.md": {"reward.py"},
    "own_experiments.md": {"reward.py"},
    "rewards.md": {"reward_model.ground_truth"},
    "tasksets.md": {"reward_model.ground_truth"},
    "workflows.md": {"model.limits", "model.options", "model.room", "model.seed"},
}
"""Columns of rows, tensors, files and attributes whose names begin as settings do."""
GENERATED = {"settings.md", "parity.md", "suite.md", "soak.md", "learning.md", "learning_ahead.md"}
"""Pages that programs write, or that list measured runs."""
PLACEHOLDER = re.compile(r"\.\.\.|…|\b[A-Z]{4,}\b")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def links(page: Path) -> list[Path]:
    """Files that a page links to, without those of other sites and without anchors."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    return [(page.parent / link).resolve() for link in found if "://" not in link]


@every_page
def test_links_lead_to_files(page: Path) -> None:
    assert [str(link) for link in links(page) if not link.exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = (re.sub(r"[`*]|\]\([^)]*\)", "", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@every_page
def test_links_lead_to_headings(page: Path) -> None:
    found = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text())
    inside = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in found if "://" not in link]
    assert [f"{to.name}#{anchor}" for to, anchor in inside if to.suffix == ".md" and anchor not in anchors(to)] == []


def test_accuracies_of_the_readme_are_in_the_tables_that_it_links() -> None:
    rows = re.findall(r"^\|.*\| (.*→.*) \| \[.*\]\((.*)\) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 3
    for shown, link in rows:
        pairs = [pair.split(" → ") for pair in shown.replace(" %", "").split(", ")]
        assert [f"{a}% → {b}%" for a, b in pairs if f"{a}% → {b}%" not in (ROOT / link).read_text()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    while more := {link for page in reached if page.suffix == ".md" for link in links(page)} - reached:
        reached |= more
    assert [str(page) for page in PAGES if page not in reached] == []


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    """By their path, or its end: ``school/read.py``. A test may be named with the options to run it."""
    named = re.findall(r"`([\w./-]+\.(?:py|md|yaml|sh|cpp))(?: -k [^`]*|::[^`]*)?`", page.read_text())
    lost = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)}
    assert lost <= OTHERS, sorted(lost - OTHERS)


@every_page
def test_folders_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:megarl|tests|configs|docs|benchmarks|slurm|tools|csrc)/[\w/]*)/`", page.read_text())
    assert [name for name in named if not (ROOT / name).is_dir()] == []


@pytest.fixture(scope="module")
def settings() -> set[str]:
    """Names of all settings and of the groups that they are in."""
    named = re.findall(r"^- `([\w.*]+)` = ", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    found = {name.removesuffix(".*") for name in named}
    groups = {name for name in named if name.endswith(".*")}
    shared = {"optimizer.*": "trainer.optimizer", "parallel.*": "parallel"}
    for group in groups:
        place = next(place for end, place in shared.items() if group.endswith(end))
        found |= {name.replace(place, group[:-2], 1) for name in named if name.startswith(f"{place}.")}
    return found | {name[: at.start()] for name in found for at in re.finditer(r"\.", name)}


@every_page
def test_settings_that_are_named_exist(page: Path, settings: set[str]) -> None:
    if page.name == "settings.md":
        return  # generated, and compared in test_settings_reference.py
    groups = "|".join(Config.__dataclass_fields__)
    named = set(re.findall(rf"`['~]*((?:{groups})\.[a-z0-9_.]*[a-z0-9_])(?:[=:\s][^`]*)?`", page.read_text()))
    named -= NO_SETTINGS.get(page.name, set())
    lost = {n for n in named - settings if not n.startswith("taskset.options.") and not n.startswith("store.db")}
    assert sorted(lost) == []


def blocks(page: Path) -> Iterator[str]:
    """Lines of blocks of code, fenced or indented; a line that ends with a backslash goes on in the next one."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:bash|sh)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^\n)((?:    .+\n)+)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    for block in (*fenced, *indented):
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines())


def commands(page: Path) -> list[list[str]]:
    """Words of the commands in blocks of code, without variables before them and what follows a pipe or ``>``."""
    found = []
    for line in blocks(page):
        if re.match(r"(?:\w+=\S+ )*(?:megarl|make|python|sbatch|torchrun|slurm/\w+\.sh) ", line):
            words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)
            found.append(words[next(i for i, word in enumerate(words) if not re.match(r"\w+=", word)) :])
    return found


def check_overrides(words: list[str], *, swept: bool = False) -> None:
    """Compose what is written, without values that a reader puts in."""
    given = [word for word in words if not PLACEHOLDER.search(word)]
    if swept and given:
        combinations(given)
    else:
        compose(given)


def check_command(words: list[str]) -> None:
    """Raises AssertionError, SystemExit or ConfigError for a command that is none."""
    if "megarl" in words[1:]:  # behind a launcher
        words = words[words.index("megarl") :]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in {*targets, ".venv/.installed"}] == []
    elif words[0] == "megarl":
        arguments = cli.parse_arguments([word for word in words[1:] if word not in ("...", "…")])
        if hasattr(arguments, "overrides") and not getattr(arguments, "config_dir", None):
            check_overrides(arguments.overrides, swept=getattr(arguments, "multirun", False))
    elif scripts := [word for word in words if word.endswith((".sh", ".py"))]:
        # ``megarl init`` writes a job.sh.
        assert (ROOT / scripts[0]).is_file() or scripts[0].endswith("/job.sh"), scripts[0]
        overrides = words[words.index(scripts[0]) + 1 :]
        if "slurm/train_" in scripts[0] or "array_sweep" in scripts[0]:
            check_overrides(overrides, swept="array_sweep" in scripts[0])


@every_page
def test_commands_in_blocks_are_valid(page: Path) -> None:
    for words in commands(page):
        try:
            check_command(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{' '.join(words)}: {error}")


def test_blocks_have_commands() -> None:
    """Else the test above would test nothing."""
    assert sum(len(commands(page)) for page in PAGES) >= 30


@pytest.mark.parametrize(
    "text",
    [
        "megarl train trainer.step=3",
        "megarl train --chek",
        "megarl trian",
        "make tests",
        "sbatch --nodes=2 slurm/train_alone.sh",
        "sbatch slurm/train_grpo.sh trainer.step=3",
        "python benchmarks/loops.py",
        "torchrun --nnodes 2 --no-python megarl trian",
    ],
)
def test_what_is_no_command(text: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check_command(shlex.split(text))


def test_a_command_is_not_cut_by_wrapping() -> None:
    """The lines of a block are commands, their ends continued by a backslash, or something else than settings."""
    cut = {
        f"{page.name}: {line}"
        for page in PAGES
        for line in blocks(page)
        if re.match(r"(?:train|data|config) [\w.]+=|[a-z_]+\.[a-z_.]+=", line)
    }
    assert cut == set()


@every_page
def test_commands_in_sentences_exist(page: Path) -> None:
    """Of a command in backticks the name, its action, its options and, where it has any, its overrides."""
    for text in re.findall(r"`(megarl [^`]*)`", page.read_text()):
        words = [word for word in shlex.split(text) if not re.search(r"[\[\]]", word) and word not in ("...", "…", ">")]
        if words[1] in ("train", "data", "config"):
            words = [
                "1" if word == "N" or word.startswith("$") else word for word in words if not word.startswith("docs/")
            ]
            check_command([*words, "RUN"] if words[2:] == ["prune"] else words)
        elif words[1] in ("convert", "rewards", "sandbox") and len(words) > 2:
            with pytest.raises(SystemExit) as ended:
                cli.build_parser().parse_args([*words[1:3], "--help"])
            assert ended.value.code == 0, text
        else:
            assert words[1] in cli.COMMANDS, text


@every_page
def test_lines_end_at_120_columns(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_hand_written_pages_have_few_words() -> None:
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    longest = sorted(words.keys() - GENERATED, key=lambda name: -words[name])
    total = sum(words[name] for name in longest)
    assert total <= 47_000, f"{total} words: shorten pages, the longest are {', '.join(longest[:5])}"
