"""Checks of rows and rewards against each other, the model, its tokenizer and held-out rows."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.buffer.store import ExpertExperience
from megarl.config import Config
from megarl.config.algorithms import reads_teacher
from megarl.config.derived import context_tokens
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.core.schema import Message, Preference, Task
from megarl.explore import environments
from megarl.explore.workflows import asks_verifier
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.code import check_code
from megarl.rewards.pool.child import end_servers
from megarl.rewards.pool.process import check_hosts
from megarl.rewards.routes import JUDGE, check_source, route
from megarl.rewards.verdict import LATE, check_weights
from megarl.run.checks.distillation import check_taught_experts
from megarl.run.checks.vision import check_image_files_of, check_images, check_patches
from megarl.run.run_dir.rows import Rows, from_source, place, processor_of, read_split
from megarl.tasks import (
    ChatTokenizer,
    Place,
    encode_demonstrations,
    encode_preferences,
    encode_rows,
    place_of_row,
    tokenizer_digest,
)
from megarl.tasks.row_files import WHOLE, Faults
from megarl.weights.checkpoint.formats.hf_source import read_hf_config

if TYPE_CHECKING:
    from megarl.tasks.image_processor import Processor


log = logging.getLogger(__name__)

NAMED = 5
"""Number of further rows that an error names."""


def check_rewards(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Check that every row has a verifier that works here: a user's verifier scores a row, programs can be isolated, a
    judge responds.

    Raises:
        ConfigError, DataError: names the setting or the row.
    """
    if not asks_verifier(config.rollout):
        return
    reward = config.reward
    key = os.environ.get("MEGARL_JOB_KEY", "")
    if reward.path is not None:
        _try_reward(config, next(iter(tasks.values()))[0])
        asyncio.run(check_hosts(reward, key, []))
        return
    sources = _families(config, tasks)
    if "code" in sources:
        try:
            log.info("programs in answers are run in %s", check_code(reward))
        except SandboxError as error:
            raise ConfigError(
                f"rows go to the verifier of programs, which are not run unless they can be isolated: {error}"
            ) from error
    if LATE in sources:
        check_weights(reward)
    if JUDGE in sources or reward.judge.url is not None:
        from megarl.rewards.judge.judge import check_judge

        check_judge(reward.judge, context_tokens=context_tokens(config.rollout))
    asyncio.run(check_hosts(reward, key, [source for family, source in sources.items() if family != JUDGE]))


def check_environment_rows(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Raise DataError naming the first row that the environment's ``check_row(task)`` or ``check_row(task, options)``
    refuses. Environments without that function accept all rows."""
    if config.rollout.workflow != "environment":
        return
    check_row = getattr(environments.get(config.rollout.environment), "check_row", None)
    if check_row is None:
        return
    if "options" in inspect.signature(check_row).parameters:
        check_row = partial(check_row, options=config.rollout.options)
    for split, rows in tasks.items():
        for task in rows:
            try:
                check_row(task)
            except DataError as error:
                raise DataError(f"{place(config, split, task)}: {error}") from error


def _families(config: Config, tasks: Mapping[str, list[Task]]) -> dict[str, str]:
    """Return family -> one of its data sources. Raises DataError naming the first row without a verifier."""
    families: dict[str, str] = {}
    known: set[str] = set()
    for split, rows in tasks.items():
        for task in rows:
            if task.data_source in known:
                continue
            try:
                family = route(task.data_source, config.reward.routes)[0]
                if family != "code":  # checked separately: it needs a sandbox
                    check_source(task.data_source, config.reward)
            except DataError as error:
                fix = "; or set rollout.agent_rewards=true, where the agent returns the reward of every trajectory"
                more = fix if config.rollout.workflow == "agent" else ""
                raise DataError(
                    f"{place(config, split, task)}, data_source {task.data_source!r}: {error}{more}"
                ) from error
            known.add(task.data_source)
            families.setdefault(family, task.data_source)
    return families


def _try_reward(config: Config, task: Task) -> None:
    """Try the reward in a separate process, as in the job, to detect a file that hangs or ends its process."""

    async def trial() -> Verdict:
        async with RewardPool(replace(config.reward, workers=1, hosts=[], retries=0)) as pool:
            return await pool.score(task, str(task.ground_truth))

    verdict = asyncio.run(trial())
    end_servers()  # the explorer starts separate ones
    if verdict.message is None:
        return
    if verdict.reported:
        log.warning("reward.path=%s: for %s %s", config.reward.path, place(config, "train", task), verdict.message)
        return
    raise ConfigError(
        f"reward.path={config.reward.path} gives no score for {place(config, 'train', task)} (answered with its ground "
        f"truth): {verdict.message}; fix the function, or raise reward.timeout_s where it needs longer"
    )


def check_lengths(
    config: Config,
    split: str,
    rows: Rows,
    tokenizer: ChatTokenizer,
    context: int,
    processor: Processor | None = None,
    faults: Faults | None = None,
) -> None:
    """Check that each demonstration or preference fits the model's context and a micro-batch.

    Args:
        processor: The model's processor, if rows of the job have images.
        faults: Rows that do not fit are added; None refuses the first.

    Raises:
        DataError: a row does not fit; or the answers of a preference have the same tokens.
    """
    grids = (config.parallel, config.reference.parallel or config.parallel)
    piece = max(2 * grid.cp if grid.cp > 1 else 1 for grid in grids)  # context parallelism pads to multiples of it
    pairs = [row for row in rows if isinstance(row, Preference)]
    tasks = [row for row in rows if isinstance(row, Task)]
    path = partial(place_of_row, config.taskset, split)
    encoded = (
        encode_preferences(pairs, tokenizer, path=path) if pairs else encode_demonstrations(tasks, tokenizer, path=path)
    )
    added = [0] * len(rows)
    if processor is not None:
        from megarl.tasks.image_processor import added_lengths

        added = added_lengths(rows, tokenizer, processor, path=path)
    for row, (prompt, *answers), more in zip(rows, encoded, added, strict=True):
        if (fault := _fault_of_lengths(config, len(prompt) + more, answers, context, piece)) is not None:
            if faults is None:
                all_such = "" if split == WHOLE else ", or leave out all such rows (taskset.bad_rows=drop)"
                raise DataError(f"{place(config, split, row)}{fault}{all_such}")
            faults[row.task_id] = f"{place(config, split, row)}{fault}"


def _fault_of_lengths(
    config: Config, prompt: int, answers: Sequence[np.ndarray], context: int, piece: int
) -> str | None:
    lengths = [prompt + len(answer) for answer in answers]
    if max(lengths) > context:
        return (
            f" has {max(lengths)} tokens with its answer, the model's context is {context} (max_position_embeddings); "
            "drop the row"
        )
    limit = config.trainer.max_tokens_per_micro_batch
    wanted = sum(length + -length % piece for length in lengths)
    if config.trainer.packing and wanted > limit:
        what = "its two answers, each behind the prompt," if len(lengths) > 1 else "its answer"
        return (
            f" takes {wanted} tokens with {what} and trainer.max_tokens_per_micro_batch is {limit}; raise it or drop "
            "the row"
        )
    if len(answers) == 2 and np.array_equal(answers[0], answers[1]):
        return f": chosen and rejected are the same tokens to the tokenizer of {config.model.path}; drop the row"
    return None


def check_held_out(config: Config, held_out: Rows, others: Mapping[str, Rows]) -> None:
    """Check that no other row asks a held-out question, up to white space and case. Raises DataError naming the row."""
    questions = {_question(row) for row in held_out}
    for name, rows in others.items():
        found = [row for row in rows if _question(row) in questions]
        if found:
            first, rest = found[0], found[1:]
            named = [place(config, name, row) for row in rest[:NAMED]] + ["…"] * (len(rest) > NAMED)
            also = f", as do {len(rest)} others: {', '.join(named)}" if rest else ""
            raise DataError(
                f"{place(config, name, first)} asks a question of taskset.eval: "
                f"{first.prompt[-1].get('content')!r}{also}; drop them there or from taskset.eval (spaces and "
                "capitals make no difference here)"
            )


def _question(row: Task | Preference) -> tuple[object, ...]:
    images = (hashlib.sha256(image).digest() for image in row.images)
    return *(_normalised(message) for message in row.prompt), *images


def _normalised(message: Message) -> tuple[str, ...]:
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    text = " ".join((message.get("content") or "").split()).casefold()
    return (message["role"], text, *([json.dumps(others, sort_keys=True)] if others else ()))


def check_vocabulary(
    config: Config, rows: Mapping[str, Rows], tokenizer: ChatTokenizer, size: int, *, sampled: Sequence[str]
) -> None:
    """Check that every token of ``rows`` (by split) and the end-of-response token have an embedding.

    Args:
        size: The model's ``vocab_size``.
        sampled: Splits whose rows are only prompts.

    Raises:
        ConfigError, DataError: a token has no embedding, with the row. Unused tokens without an embedding only cause a
            warning.
    """
    if tokenizer.largest_id < size:
        return
    what = (
        f"the tokenizer of model.path={config.model.path} has ids up to {tokenizer.largest_id} and the model "
        f"vocab_size={size}"
    )
    fix = "take the model's own tokenizer, or resize the model's embeddings"
    if (end := max(tokenizer.eos_ids)) >= size:
        raise ConfigError(f"{what}: end-of-sequence token {end} has no embedding; {fix}")
    for split, found in rows.items():
        path = partial(place_of_row, config.taskset, split)
        for row, texts in zip(found, _encoded(found, tokenizer, path, split in sampled), strict=True):
            if (largest := max(int(ids.max(initial=0)) for ids in texts)) >= size:
                raise DataError(
                    f"{place(config, split, row)} has token {largest}, {tokenizer.token(largest)!r}, "
                    f"and {what}; {fix}, or drop the row"
                )
    log.warning("%s; no row has a token without an embedding", what)


def _encoded(rows: Rows, tokenizer: ChatTokenizer, path: Place, sampled: bool) -> Iterator[Sequence[np.ndarray]]:
    pairs = [row for row in rows if isinstance(row, Preference)]
    tasks = [row for row in rows if isinstance(row, Task)]
    if pairs:
        yield from encode_preferences(pairs, tokenizer, path=path)
    elif sampled:
        yield from ([ids] for ids in encode_rows(tasks, tokenizer, path=path))
    else:
        yield from encode_demonstrations(tasks, tokenizer, path=path)


class ExpertCheck:
    """Checks of a job's expert rows from any source."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = ChatTokenizer.of(config)
        self._hf_config = read_hf_config(Path(config.model.path))
        self._held_out = read_split(config, "eval")

    def rows(self, source: str, experts: Sequence[ExpertExperience]) -> None:
        """Check the rows of one source. Raises DataError with the source and the row."""
        config, rows = from_source(self._config, source), [expert.task for expert in experts]
        check_held_out(config, self._held_out, {"expert": rows})
        check_images(config, self._hf_config, {"expert": rows})
        vocabulary = int(self._hf_config["vocab_size"])
        check_vocabulary(config, {"expert": rows}, self._tokenizer, vocabulary, sampled=())
        context = int(self._hf_config["max_position_embeddings"])
        processor = processor_of(config, [rows])
        check_lengths(config, "expert", rows, self._tokenizer, context, processor)
        check_patches(config, {"expert": rows}, processor, pairs=False)
        check_image_files_of(config, "expert", rows)
        check_teacher(config, experts, self._tokenizer)
        check_taught_experts(config, rows)


def check_teacher(config: Config, experts: Sequence[ExpertExperience], tokenizer: ChatTokenizer) -> None:
    """Check that rows have their teacher's log-probs for this tokenizer, if the loss reads them.

    Args:
        config: Settings with the rows' source as ``taskset.expert``.

    Raises:
        DataError: a row lacks log-probs, or its log-probs are for another tokenizer or template.
    """
    if not reads_teacher(config.algorithm):
        return
    digest = tokenizer_digest(Path(config.model.path))
    fix = (
        "give each row of the source one log-prob for each token of its response (for rows that are imported already, "
        "in a new run), or set algorithm.expert_loss=sft"
    )
    responses = encode_demonstrations([expert.task for expert in experts], tokenizer)
    for expert, (_, response) in zip(experts, responses, strict=True):
        logp, where = expert.teacher_logp, place(config, "expert", expert.task)
        if logp is None:
            raise DataError(f"{where} has no teacher_logp, and algorithm.expert_loss=off_policy reads it; {fix}")
        if expert.tokenizer != digest:
            raise DataError(
                f"{where}: teacher_logp was made with the tokenizer {expert.tokenizer}, but model.path="
                f"{config.model.path} has {digest}; import log-probs of a teacher with the same tokenizer.json, or set "
                "algorithm.expert_loss=sft"
            )
        if len(logp) != len(response):
            raise DataError(
                f"{where}: teacher_logp has {len(logp)} log-probs, and the response {len(response)} tokens with the "
                f"chat template of model.path={config.model.path}; {fix}"
            )
