"""Checks of rows and rewards against each other, the model's tokenizer and held-out rows."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.config import Config
from megarl.config.lengths import context_tokens
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.core.schema import Message, Preference, Task
from megarl.explore import environments
from megarl.explore.workflows import asks_verifier
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.code.verifier import check_code
from megarl.rewards.pool.child import end_servers
from megarl.rewards.pool.process import check_hosts
from megarl.rewards.routes import JUDGE, check_source, route
from megarl.rewards.shape import check_weights
from megarl.rewards.verdict import LATE
from megarl.run.run_dir.rows import Rows, place
from megarl.tasks import ChatTokenizer, encode_demonstrations, encode_preferences, place_of_row
from megarl.tasks.bad_rows import WHOLE, Faults

if TYPE_CHECKING:
    from megarl.tasks.images.processor import Processor

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
        from megarl.tasks.images.processor import added_lengths

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
