"""Rows from reasoning-gym: files whose held-out questions occur in no other.

Which side a question belongs to is a property of its text: a hash decides, so train and eval have the same
distribution (also where small numbers leave few distinct questions) and cannot overlap, however many rows are drawn.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.tasks.generators import entries, school
from megarl.tasks.generators.entries import (
    ARITHMETIC,
    OPTION_BOUNDS,
    SUMS,
    Entry,
    Generator,
    basic_arithmetic,
    chain_sum,
    identity,
)
from megarl.tasks.row_files import is_json
from megarl.tasks.rows import Kind, write_preferences, write_rows

MAX_DRY_DRAWS = 50_000
"""Consecutive draws without a new question after which a file's size counts as unreachable (half a second)."""
SPLITS = ("train", "eval", "warm_start", "expert")
DEMONSTRATIONS = ("warm_start", "expert")
SLIPS = 0.5
"""Share of rejected answers that are the careless teacher's; the others have another digit wrong."""


def generate(
    name: str,
    paths: Mapping[str, str | Path],
    sizes: Mapping[str, int],
    *,
    seed: int,
    options: Mapping[str, int] | None = None,
    kind: Kind = "tasks",
) -> dict[str, list[Task] | list[Preference]]:
    """Write the splits that ``paths`` names (of train, eval, warm_start, expert) with ``sizes`` rows each; returns
    them.

    Questions are distinct within a file; the others may share some; eval shares none with any.
    Demonstrations carry the right answer as ``response``; preferences have it as ``chosen``, and a wrong one near it as
    ``rejected``. The same arguments write the same rows, and ask the same questions whatever the ``kind``.

    Raises ConfigError for an unknown generator or option or a name that is not parquet's, DataError when there are too
    few distinct questions.
    """
    made_with = {split: recipe(name, sizes, seed=seed, options=options, kind=kind, split=split) for split in SPLITS}
    for split, path in paths.items():
        if is_json(path):
            raise ConfigError(
                f"taskset.{split}={path}: no such file, and what megarl generates is parquet; give the file, or a path "
                "that ends in .parquet"
            )
    settings = _settings(name, options or {})
    wanted = [split for split in SPLITS if split in paths]
    drawn = {split: _draw(name, split, sizes[split], _eval_share(sizes), seed, settings) for split in wanted}
    # Each split takes from the questions of the others: the one that lacks most is to blame.
    worst = max(wanted, key=lambda split: sizes[split] - len(drawn[split]))
    if len(drawn[worst]) < sizes[worst]:
        raise DataError(
            f"taskset.{worst}_size={sizes[worst]} cannot be reached: {name} with {settings} has only about "
            f"{len(drawn[worst])} distinct questions for {worst}; lower the size or widen taskset.options"
        )
    found: dict[str, list[Task] | list[Preference]] = {}
    for split in wanted:
        if kind == "preferences" and split not in DEMONSTRATIONS:
            found[split] = _preferences(split, drawn[split], seed)
        else:
            found[split] = _tasks(split, drawn[split], seed, settings, kind)
    _check_disjoint(found)
    for split, rows in found.items():
        _write(paths[split], rows, made_with[split])
    return found


def _write(path: str | Path, rows: Sequence[Task | Preference], made_with: Mapping[str, Any]) -> None:
    """Write rows of either kind with what they were made with."""
    preferences = [row for row in rows if isinstance(row, Preference)]
    tasks = [row for row in rows if isinstance(row, Task)]
    if preferences:
        write_preferences(path, preferences, made_with)
    else:
        write_rows(path, tasks, made_with)


def recipe(
    name: str,
    sizes: Mapping[str, int],
    *,
    seed: int,
    options: Mapping[str, int] | None = None,
    kind: Kind = "tasks",
    split: str = "train",
) -> dict[str, Any]:
    """Return the settings that determine the output of ``generate``; each file stores them, to detect changes.

    What is held out depends on the sizes of train, eval and warm_start, so all three decide on each file; that of
    expert decides on its own file alone.

    Raises ConfigError for an unknown generator or option.
    """
    settings = _settings(name, options or {})
    assert kind in get_args(Kind), f"kind of rows {kind!r}"
    return {
        **({} if kind == "tasks" else {"kind of rows": kind}),  # files of earlier versions have tasks and no such entry
        "taskset.generate": name,
        **({"its code": entries.digest(name)} if entries.is_file(name) else {}),
        "taskset.seed": seed,
        **{f"taskset.{other}_size": size for other, size in sizes.items() if other != "expert" or split == "expert"},
        **{f"taskset.options.{option}": value for option, value in settings.items()},
    }


GENERATORS = {
    "chain_sum": Generator(chain_sum, ARITHMETIC),
    "basic_arithmetic": Generator(basic_arithmetic, ARITHMETIC),
    "math": Generator(school.math, SUMS),
    "k12": Generator(school.k12, SUMS),
    "code": Generator(school.code, SUMS),
    "guess": Generator(school.guess, school.OPTIONS),
    "shapes": Generator(school.shapes, school.PICTURE_OPTIONS, school.PICTURE_BOUNDS),
}


def generator_of(name: str) -> Generator:
    """Return the generator named by ``taskset.generate``: megarl's, or a Python file's. Raises ConfigError for an
    unknown one."""
    if entries.is_file(name):
        return entries.load(name)
    if name not in GENERATORS:
        raise ConfigError(
            f"taskset.generate={name!r} is not known;{_nearest(name, GENERATORS)} known: {', '.join(GENERATORS)}, or a "
            "Python file with your own"
        )
    return GENERATORS[name]


def _start(split: str, seed: int) -> int:
    """Return the seed of a split. reasoning-gym's seeds s and s+1 give the same stream shifted by an entry, so splits
    are far apart."""
    return seed * 10**9 + SPLITS.index(split) * 10**8


def _draw(name: str, split: str, size: int, eval_share: float, seed: int, settings: Mapping[str, int]) -> list[Entry]:
    """Return ``size`` distinct questions of a split, or all if fewer exist."""
    seen: dict[str, Entry] = {}
    dry = 0
    for entry in generator_of(name).entries(_start(split, seed), settings):
        if len(seen) == size or dry == MAX_DRY_DRAWS:
            break
        dry += 1
        asked = entry.identity if entry else ""
        if entry and asked not in seen and _is_held_out(asked, seed, eval_share) == (split == "eval"):
            seen[asked] = entry
            dry = 0
    return list(seen.values())


def _tasks(split: str, entries: list[Entry], seed: int, settings: Mapping[str, int], kind: Kind) -> list[Task]:
    start = _start(split, seed)
    # Small numbers run out first among distinct draws, so a file would otherwise get harder row by row.
    random.Random(start).shuffle(entries)
    slips = random.Random(start + 1)
    share = settings.get("slip_percent", 0) / 100 if split == "warm_start" else 0.0
    tasks = [_task(split, i, entry) for i, entry in enumerate(entries)]
    if kind == "tasks" and split not in DEMONSTRATIONS:
        return tasks
    return [
        replace(task, response=entry.slip if slips.random() < share else entry.response)
        for task, entry in zip(tasks, entries, strict=True)
    ]


def _task(split: str, index: int, entry: Entry) -> Task:
    return Task(
        task_id=f"{split}/{index}",
        data_source=entry.data_source,
        prompt=({"role": "user", "content": entry.question},),
        ability=entry.ability,
        reward_model={"style": "rule", "ground_truth": entry.answer},
        extra_info=_extra_info(split, index, entry),
        images=entry.images,
    )


def _preferences(split: str, entries: list[Entry], seed: int) -> list[Preference]:
    start = _start(split, seed)
    random.Random(start).shuffle(entries)
    dice = random.Random(start + 2)
    return [
        Preference(
            task_id=f"{split}/{index}",
            data_source=entry.data_source,
            prompt=({"role": "user", "content": entry.question},),
            chosen=entry.response,
            rejected=_mistaken(entry, dice),
            extra_info=_extra_info(split, index, entry),
            images=entry.images,
        )
        for index, entry in enumerate(entries)
    ]


def _extra_info(split: str, index: int, entry: Entry) -> dict[str, Any]:
    info = json.loads(json.dumps(entry.info))  # tuples become the lists that parquet gives back
    return {"split": split, "index": index, "question": entry.question, **info}


def _mistaken(entry: Entry, dice: random.Random) -> str:
    """A wrong answer that is near: the careless teacher's; or, of a bare number, one with another digit in some
    place."""
    answer = entry.response
    if answer != entry.answer or dice.random() < SLIPS:
        return entry.slip
    places = [i for i, character in enumerate(answer) if character.isdigit()]
    if not places:
        return entry.slip
    place = dice.choice(places)
    leads = place == places[0] and len(answer) > 1  # no number begins with 0
    digit = dice.choice([d for d in "0123456789"[leads:] if d != answer[place]])
    return answer[:place] + digit + answer[place + 1 :]


def _eval_share(sizes: Mapping[str, int]) -> float:
    """Return the held-out share of all questions: in proportion to the files' sizes, from a tenth to a half."""
    held_out, used = sizes.get("eval", 0), max(sizes.get("train", 0), sizes.get("warm_start", 0))
    return min(0.5, max(0.1, held_out / max(1, held_out + used)))


def _is_held_out(asked: str, seed: int, share: float) -> bool:
    """``asked``: ``Entry.identity``."""
    digest = hashlib.blake2b(asked.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _check_disjoint(rows: Mapping[str, Sequence[Task | Preference]]) -> None:
    held_out = set(map(_asked, rows.get("eval", ())))
    for split in set(SPLITS) - {"eval"}:
        shared = held_out.intersection(map(_asked, rows.get(split, ())))
        assert not shared, f"{len(shared)} held-out questions occur in {split}, for example {min(shared)!r}"


def _asked(row: Task | Preference) -> str:
    return identity(row.prompt[-1]["content"], row.images)


def _settings(name: str, options: Mapping[str, int]) -> dict[str, int]:
    known = generator_of(name).options
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(
            f"taskset.options.{', '.join(unknown)} {'are not options' if unknown[1:] else 'is not an option'} of "
            f"{name};{_nearest(unknown[0], known)} known: {', '.join(known)}; '~taskset.options' on the command line "
            "takes out those of an experiment"
        )
    for option, value in options.items():
        bound = (OPTION_BOUNDS | dict(generator_of(name).bounds)).get(option)
        if bound is not None and not bound.admits(value):
            raise ConfigError(f"taskset.options.{option}={value} must be {bound}; the default is {known[option]}")
    settings = {**known, **options}
    if any(settings.get(f"max_{name}", 0) < settings.get(f"min_{name}", 0) for name in ("terms", "digits", "shapes")):
        raise ConfigError(f"taskset.options: a maximum is below its minimum in {settings}")
    return settings


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    return f" did you mean {nearest[0]!r}?" if nearest else ""
