"""``megarl data teach``: scores of stored responses by teachers, which ``algorithm=sft`` with a ``divergence`` reads.

Rows are scored in parts. Each part is a file beside the result until all are there, so a killed command goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config import Config, compose, load_resolved
from megarl.config.algorithms import DistillConfig, KLConfig, teacher_top_k
from megarl.config.derived import teacher_of, teacher_role
from megarl.config.lora import LoraConfig
from megarl.core.durable import whole
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task, digest_of
from megarl.learn import algorithms
from megarl.rewards.teacher_server import score_rows
from megarl.run.checks.distillation import check_servers, check_taught
from megarl.run.checks.inputs import check_lengths, check_vocabulary
from megarl.run.checks.roles import check_role_models, check_role_settings
from megarl.run.data.open_run import progress
from megarl.run.process import ports
from megarl.run.report.data import located
from megarl.run.run_dir.rows import place, read_run
from megarl.tasks import ChatTokenizer, encode_demonstrations, read_rows, tokenizer_digest
from megarl.tasks.row_files import read_recipe, write_table
from megarl.tasks.teacher_scores import COLUMNS, Pair, Score, Scored, columns_of
from megarl.weights.checkpoint.convert.verify import check_digests
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.megatron_private import silence

PART_ROWS = 64
"""Rows of a part; after a kill at most these are scored again."""
SCHEMA = pa.schema(
    [
        *(("data_source", pa.string()), ("prompt", pa.string()), ("response", pa.string()), ("messages", pa.string())),
        ("chat_template_kwargs", pa.string()),
        *COLUMNS,
    ]
)
"""Columns of the result; messages and options are JSON text."""
DEFAULTS = {"experiment": "own", "algorithm": "distill", "parallel": "tp1", "taskset.train": "", "taskset.eval": ""}


@dataclass(frozen=True)
class Lesson:
    """Rows to score, checked, with their tokens for the student."""

    config: Config
    """Settings with the teachers; ``taskset.train`` is the source."""
    tasks: Sequence[Task]
    pairs: Sequence[Pair]
    tokenizer: ChatTokenizer
    vocab_size: int
    """The student's."""

    @property
    def recipe(self) -> dict[str, Any]:
        """All that the scores depend on."""
        rows = hashlib.blake2b("".join(digest_of(ids) for pair in self.pairs for ids in pair).encode(), digest_size=8)
        files = {name: files_of(self.config, name) for name in self.config.teachers}
        settings = {
            name: [list(teacher.sources), teacher.dtype or self.config.model.dtype]
            for name, teacher in self.config.teachers.items()
        }
        return {
            "rows": rows.hexdigest(),
            "tokenizer": tokenizer_digest(Path(self.config.model.path)),
            "top_k": teacher_top_k(self.config.algorithm),
            "teachers": files,
            "settings": settings,
        }


def teach(
    source: Path,
    overrides: Sequence[str],
    *,
    top_k: str = "0",
    out: str | None = None,
    min_score: float | None = None,
    own: str | None = None,
) -> tuple[Path, int]:
    """Score the responses of a run or file, and write them as parquet; return the file and its number of rows.

    Args:
        overrides: Settings, with ``teachers.NAME.*``.
        top_k: Number of the teacher's likeliest tokens to keep; 0 for none.
        out: The parquet file to write; None for one beside the rows, or in the run's directory.
        min_score: Least score of a run's responses; None for all.
        own: Folder of the user's settings.

    Raises:
        ConfigError, DataError: the file exists, or parts of other rows or teachers; a setting or row does not fit.
        JobError: a teacher's server fails; the scored parts stay.
    """
    file = Path(out) if out else _default(source)
    if file.suffix != ".parquet" or file.exists() or not file.parent.is_dir():
        why = "exists" if file.exists() else "must end in .parquet and be in a folder that exists"
        raise ConfigError(f"out={file} {why}; give another file (out=FILE.parquet)")
    lesson = _checked(_settings(source, overrides, _count(top_k), own), source, min_score)
    recipe, parts = lesson.recipe, file.with_name(f"{file.name}.parts")
    files = [parts / f"{start:09d}.parquet" for start in range(0, len(lesson.tasks), PART_ROWS)]
    if strange := next((part for part in files if part.exists() and read_recipe(part) != recipe), None):
        raise ConfigError(f"{strange} has scores of other rows, teachers or top_k; remove {parts}, or give another out")
    with progress(len(lesson.tasks), "rows") as bar, _teachers(lesson) as score:
        for number, part in enumerate(files):
            rows = range(number * PART_ROWS, min((number + 1) * PART_ROWS, len(lesson.tasks)))
            if not part.exists():
                write_table(part, _rows(lesson, rows, score, recipe), recipe, SCHEMA)
            bar.update(len(rows))
    with whole(file) as temporary, pq.ParquetWriter(temporary, SCHEMA) as writer:
        for part in files:
            with pq.ParquetFile(part) as opened:
                writer.write_table(opened.read().replace_schema_metadata(None))
    shutil.rmtree(parts)
    return file, len(lesson.tasks)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"top_k={text} must be a whole number of 0 or more; 0 keeps the tokens' log-probs alone")
    return int(text)


def _default(source: Path) -> Path:
    return source / "taught.parquet" if source.is_dir() else source.with_name(f"{source.stem}_taught.parquet")


def _settings(source: Path, overrides: Sequence[str], top_k: int, own: str | None) -> Config:
    """Return the settings of ``overrides``, with model and template of a run. Raises ConfigError."""
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    of_run = source.is_dir() and "model.path" not in given
    defaults = DEFAULTS | ({"model.path": "run"} if of_run else {})
    config = compose(
        [*(f"{name}={value}" for name, value in defaults.items() if name not in given), *overrides], own=own
    )
    if config.parallel.world_size != 1:
        raise ConfigError(f"parallel has {config.parallel.world_size} ranks; teach computes on one: leave parallel out")
    if not config.teachers:
        raise ConfigError("teachers is empty; set teachers.NAME.path to an HF checkpoint, or teachers.NAME.url")
    taskset = config.taskset
    if of_run:
        if not (source / "resolved.json").is_file():
            raise ConfigError(f"{source} has no resolved.json; give the directory of a run, or a file of rows")
        stored = load_resolved(source / "resolved.json")
        model = replace(stored.model, path=str(located(stored, source, stored.model.path)), lora=LoraConfig())
        config, taskset = replace(config, model=model), replace(stored.taskset, columns={})
    divergence: Any = "forward_kl" if top_k else "sampled"
    algorithm = DistillConfig(name="distill", kl=KLConfig(0.0), divergence=divergence, top_k=top_k)
    return replace(config, algorithm=algorithm, taskset=replace(taskset, train=str(source), expert=str(source)))


def _checked(config: Config, source: Path, min_score: float | None) -> Lesson:
    """Read the rows; check them, the teachers and their tokens as a job of ``algorithm=distill`` does."""
    distill, hf_config = algorithms.get("distill"), read_hf_config(Path(config.model.path))
    check_role_settings(config, distill)
    check_role_models(config, distill, hf_config)
    here = {name: teacher.path for name, teacher in config.teachers.items() if teacher.path is not None}
    for name, path in here.items():
        check_digests(Path(path), f"{teacher_role(name)}.path", workers=os.cpu_count() or 1)
    if source.is_dir():
        tasks = [expert.task for expert in read_run(source, -1e300 if min_score is None else min_score)]
    else:
        tasks = read_rows(source, require_response=True, split="train", columns=config.taskset.columns)
    if shown := next((task for task in tasks if task.images), None):
        raise DataError(f"{place(config, 'train', shown)} has images, which teach does not score; leave the row out")
    check_taught(config, tasks)
    tokenizer, vocab_size = ChatTokenizer.of(config), int(hf_config["vocab_size"])
    check_vocabulary(config, {"train": tasks}, tokenizer, vocab_size, sampled=())
    pairs = encode_demonstrations(tasks, tokenizer)
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    config = _with_room(config, longest)
    contexts = [int(read_hf_config(Path(path))["max_position_embeddings"]) for path in here.values()]
    check_lengths(config, "expert", tasks, tokenizer, min(contexts, default=longest))
    check_servers(config, tokenizer, longest)
    return Lesson(config, tasks, pairs, tokenizer, vocab_size)


def _with_room(config: Config, longest: int) -> Config:
    """Return the settings with micro-batches that hold the longest row."""
    budget = max(config.trainer.max_tokens_per_micro_batch, longest)
    return replace(config, trainer=replace(config.trainer, max_tokens_per_micro_batch=budget))


@contextmanager
def _teachers(lesson: Lesson) -> Iterator[Score]:
    """Yield a function that scores rows by teachers with a path or at a URL."""
    config = lesson.config
    with ExitStack() as stack:
        here = None
        if any(teacher.path is not None for teacher in config.teachers.values()):
            silence()  # before Megatron is imported
            from megarl.train.inference.inference import path_teachers

            [port] = ports.choose("127.0.0.1", 1, None)
            here = stack.enter_context(path_teachers(config, lesson.vocab_size, port))

        def score(name: str, pairs: Sequence[Pair]) -> list[Scored]:
            if config.teachers[name].path is not None:
                assert here is not None
                return here(name, pairs)
            return _at_url(lesson, name, pairs)

        yield score


def _at_url(lesson: Lesson, name: str, pairs: Sequence[Pair]) -> list[Scored]:
    teacher, top_k = lesson.config.teachers[name], teacher_top_k(lesson.config.algorithm)
    found = asyncio.run(score_rows(name, teacher, top_k, lesson.tokenizer.largest_id, pairs))
    return [Scored(scores, lesson.vocab_size) for scores in found]


def _rows(lesson: Lesson, numbers: range, score: Score, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a part in the result's form."""
    of_teacher: dict[str, list[int]] = {}
    for number in numbers:
        name = teacher_of(lesson.config.teachers, lesson.tasks[number].data_source)
        of_teacher.setdefault(cast("str", name), []).append(number)  # check_taught: every row has one
    found: dict[int, dict[str, Any]] = {}
    for name, own in of_teacher.items():
        for number, scored in zip(own, score(name, [lesson.pairs[i] for i in own]), strict=True):
            scores = columns_of(scored, lesson.pairs[number], recipe["teachers"][name], recipe["tokenizer"])
            found[number] = demonstration(lesson.tasks[number]) | scores
    return [found[number] for number in numbers]


def demonstration(task: Task) -> dict[str, Any]:
    """Return a demonstration as a row that ``read_rows`` reads as the same one."""
    messages = list(task.prompt) if task.answer is None else [*task.prompt, task.answer]
    text = json.dumps(messages, ensure_ascii=False)
    is_text, kwargs = task.answer is None, task.chat_template_kwargs
    return {
        "data_source": task.data_source or None,
        "prompt": text if is_text else None,
        "response": task.response if is_text else None,
        "messages": None if is_text else text,
        "chat_template_kwargs": json.dumps(kwargs, ensure_ascii=False) if kwargs else None,
    }


def files_of(config: Config, name: str) -> str:
    """Return the digest of a teacher's files, or the name or address of its model at a server."""
    teacher = config.teachers[name]
    if teacher.path is None:
        return teacher.model or str(teacher.url)
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in Path(teacher.path).iterdir() if path.suffix in (".safetensors", ".json")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
