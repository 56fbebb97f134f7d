"""Teachers of on-policy distillation against the algorithm, each other and the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megarl.config import Config
from megarl.config.algorithms import (
    AlgorithmConfig,
    DistillConfig,
    DivergenceConfig,
    SFTConfig,
    expert_ratio,
    reads_distribution,
    teacher_top_k,
)
from megarl.config.derived import path_of, teacher_of
from megarl.config.schema import TeacherConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.learn.algorithms import Algorithm
from megarl.run.run_dir.rows import Rows, place
from megarl.tasks import ChatTokenizer, encode_demonstrations, single_file, tokenizer_digest
from megarl.tasks.teacher_scores import read_scores

log = logging.getLogger(__name__)


def check_teacher_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError unless the algorithm needs the teachers, each data source has at most one, and the settings of
    the divergence have an effect."""
    teachers, needed = config.teachers, "teacher_logp" in algorithm.needs
    _check_divergence(config.algorithm, algorithm)
    if teachers and not needed:
        raise ConfigError(
            f"teachers.{next(iter(teachers))} with algorithm.name={config.algorithm.name}, which learns from no "
            "teacher; set algorithm=distill, or leave teachers out"
        )
    if needed and not teachers:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name} learns from a teacher and teachers is empty; set "
            "teachers.NAME.path to the HF checkpoint of a language model, or teachers.NAME.url to a server of one"
        )
    for name, teacher in teachers.items():
        if teacher.url is not None:
            _check_url_settings(config, name, teacher)
            if algorithm.has_experts(config.algorithm):
                raise ConfigError(
                    f"teachers.{name}.url with algorithm.expert_ratio={expert_ratio(config.algorithm):g}: a server is "
                    "asked about sampled responses, not about expert rows; set expert_ratio=0, or give the teacher as "
                    "teachers.NAME.path"
                )
        if teacher.decay_steps is not None and not _learns_from_rewards(config.algorithm):
            _check_decay(name, teacher.decay_steps, config.trainer.steps)
    owner: dict[str | None, str] = {}
    for name, teacher in teachers.items():
        sources: list[str | None] = [*teacher.sources] or [None]
        for source in sources:
            if source == "":
                raise ConfigError(f"teachers.{name}.sources has an empty text; give names of data sources, or []")
            other = owner.setdefault(source, name)
            if other == name:
                continue
            if source is None:
                raise ConfigError(
                    f"teachers.{other} and teachers.{name} both have no sources, and a task has one teacher; set "
                    f"teachers.{name}.sources to the data sources of its tasks"
                )
            raise ConfigError(
                f"teachers.{other}.sources and teachers.{name}.sources both have {source!r}, and a task has one "
                "teacher; leave it in one of them"
            )


def _check_url_settings(config: Config, name: str, teacher: TeacherConfig) -> None:
    """Raise ConfigError for settings that a teacher at a URL cannot have."""
    from megarl.rewards.teacher_server import check_teacher_url  # 0.3 s

    check_teacher_url(name, teacher)
    if config.rollout.temperature != 1.0:
        raise ConfigError(
            f"teachers.{name}.url with rollout.temperature={config.rollout.temperature:g}: the server's log-probs of "
            "given tokens are at temperature 1; set it to 1, or give the teacher as teachers.NAME.path"
        )
    if reads_distribution(config.algorithm) and not config.algorithm.top_k:
        raise ConfigError(
            f"teachers.{name}.url with algorithm.divergence={config.algorithm.divergence} and algorithm.top_k=0: a "
            "server returns no whole distributions; set algorithm.top_k (vLLM: at most --max-logprobs, 20), or give "
            "the teacher as teachers.NAME.path"
        )
    for setting, none in (("parallel", None), ("dtype", None), ("offload", "none")):
        if getattr(teacher, setting) != none:
            raise ConfigError(
                f"teachers.{name}.{setting} with teachers.{name}.url: the server decides how it computes; leave "
                f"{setting} out"
            )


def _check_decay(name: str, decay_steps: int, steps: int) -> None:
    if decay_steps < steps:
        raise ConfigError(
            f"teachers.{name}.decay_steps={decay_steps} with trainer.steps={steps} and algorithm.reward_coef=0: later "
            "steps would have nothing to learn from; set algorithm.reward_coef above 0, or decay_steps to at least "
            "trainer.steps"
        )


def check_servers(config: Config, tokenizer: ChatTokenizer, context: int) -> None:
    """Ask the servers of teachers at URLs for their model, length and tokens. Raises ConfigError.

    Args:
        context: Most tokens of prompt and response together.
    """
    if any(teacher.url is not None for teacher in config.teachers.values()):
        from megarl.rewards.teacher_server import check_teacher_servers

        ids = [number for number in range(tokenizer.largest_id + 1) if tokenizer.token(number) is not None]
        text_of = partial(tokenizer.decode, special=True)
        top_k = teacher_top_k(config.algorithm)
        for warning in check_teacher_servers(config.teachers, ids, text_of, context, top_k):
            log.warning("%s", warning)


def _check_divergence(settings: AlgorithmConfig, algorithm: Algorithm) -> None:
    if not isinstance(settings, DivergenceConfig):
        return
    given = f"algorithm.divergence={settings.divergence}"
    if isinstance(settings, DistillConfig) and settings.teacher_tokens != "all":
        _check_teacher_tokens(settings, "teacher_logp" in algorithm.needs)
    if not reads_distribution(settings):
        if isinstance(settings, DistillConfig) and settings.name == "distill" and settings.expert_ratio:
            raise ConfigError(
                f"algorithm.expert_ratio={settings.expert_ratio:g} with {given}, whose term is for tokens that the "
                "student sampled; set algorithm.divergence to forward_kl, reverse_kl or jsd, or expert_ratio to 0"
            )
        if settings.top_k:
            raise ConfigError(
                f"algorithm.top_k={settings.top_k} with {given}, which reads the sampled token alone; set "
                "algorithm.divergence to forward_kl, reverse_kl or jsd, or top_k to 0"
            )
        if isinstance(settings, SFTConfig) and settings.cross_entropy_coef != 1.0:
            raise ConfigError(
                f"algorithm.cross_entropy_coef={settings.cross_entropy_coef:g} with {given} weighs the loss alone; set "
                "algorithm.divergence to forward_kl, reverse_kl or jsd, or leave it out"
            )
        return
    from_rows = algorithm.offline and "pairs" not in algorithm.needs
    if "teacher_logp" not in algorithm.needs and not from_rows:
        raise ConfigError(
            f"{given} with algorithm.name={settings.name}, which learns from no teacher; add teacher_logp to its needs"
        )
    if isinstance(settings, DistillConfig) and settings.name == "distill" and settings.gamma:
        raise ConfigError(
            f"algorithm.gamma={settings.gamma:g} with {given}: a divergence is a loss of its own token, without "
            "later rewards; set algorithm.gamma=0"
        )
    if settings.divergence == "jsd" and not 0.0 < settings.beta < 1.0:
        raise ConfigError(
            f"algorithm.beta={settings.beta:g} with {given} must be above 0 and below 1; set algorithm.divergence to "
            "forward_kl for the limit at 0, or reverse_kl for the one at 1"
        )


def _check_teacher_tokens(settings: DistillConfig, needed: bool) -> None:
    given = f"algorithm.teacher_tokens={settings.teacher_tokens}"
    if not needed:
        raise ConfigError(
            f"{given} with algorithm.name={settings.name}, which learns from no teacher; set it to all, or add "
            "teacher_logp to its needs"
        )
    if settings.segments != "all":
        raise ConfigError(
            f"{given} with algorithm.segments={settings.segments}, which takes parts of a thought out of the loss; set "
            "one of them to all"
        )


def check_scored_rows(config: Config, rows: Rows, tokenizer: ChatTokenizer, vocab_size: int) -> None:
    """Check the teacher's scores of an offline job's rows, if its loss reads them. Raises DataError naming the row."""
    settings, tasks = config.algorithm, [row for row in rows if isinstance(row, Task)]
    if reads_distribution(settings):
        path, pairs = Path(single_file(config.taskset, "train")), encode_demonstrations(tasks, tokenizer)
        digest = tokenizer_digest(Path(config.model.path))
        read_scores(path, tasks, pairs, top_k=settings.top_k, vocab_size=vocab_size, tokenizer=digest)


def check_top_k(config: Config, role: str, teacher_size: int, actor_size: int) -> None:
    """Raise ConfigError if ``algorithm.top_k`` exceeds the number of ids that a teacher and the actor both have."""
    settings, both = config.algorithm, min(teacher_size, actor_size)
    if reads_distribution(settings) and settings.top_k > both:
        raise ConfigError(
            f"algorithm.top_k={settings.top_k}, and {role}.path={path_of(config, role)} and the actor have {both} "
            "ids in common; lower it, or set it to 0 for the whole vocabulary"
        )


def check_taught(config: Config, tasks: Sequence[Task]) -> None:
    """Check that every task to train on has something to learn from, and no images for a teacher at a URL. Raises
    DataError naming the first that fails."""
    if not config.teachers:
        return
    known: set[tuple[str, bool]] = set()
    for task in tasks:
        kind = task.data_source, bool(task.images)
        if kind in known:
            continue
        known.add(kind)
        name = teacher_of(config.teachers, task.data_source)
        if task.images and name is not None and config.teachers[name].url is not None:
            raise DataError(
                f"{place(config, 'train', task)} has images, which teachers.{name}.url is not sent; give these tasks "
                "a teacher with a path (teachers.NAME.path)"
            )
        if name is None and not _learns_from_rewards(config.algorithm):
            raise DataError(
                f"{place(config, 'train', task)} has data_source {task.data_source!r}, which no teacher has among its "
                f"sources; add it to teachers.{next(iter(config.teachers))}.sources (prefixes end in /), give one "
                "teacher no sources, or set algorithm.reward_coef above 0 to learn from its reward alone"
            )


def check_taught_experts(config: Config, rows: Sequence[Task]) -> None:
    """Check that every expert row of distillation has a teacher, which is all that it teaches. Raises DataError naming
    the first without one."""
    if config.algorithm.name != "distill" or not expert_ratio(config.algorithm):
        return
    for row in rows:
        if teacher_of(config.teachers, row.data_source) is None:
            raise DataError(
                f"{place(config, 'expert', row)} has data_source {row.data_source!r}, which no teacher has among its "
                f"sources; add it to teachers.{next(iter(config.teachers), 'NAME')}.sources, or give one teacher no "
                "sources"
            )


def _learns_from_rewards(settings: AlgorithmConfig) -> bool:
    """Return True if a task without a teacher has an advantage. A user's algorithm may give it one."""
    return not isinstance(settings, DistillConfig) or settings.name.endswith(".py") or settings.reward_coef > 0
