"""Scores of given rows by teachers with a path, computed by this process as the only rank (``megarl data teach``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megarl import ops
from megarl.config import Config
from megarl.config.algorithms import teacher_top_k
from megarl.config.lora import LoraConfig
from megarl.core.schema import TeacherScores
from megarl.learn.batching import of_demonstrations
from megarl.learn.models.teaching import LikeliestTokens
from megarl.learn.parallel import process_groups
from megarl.learn.training.model import Model, micro_batching_for
from megarl.learn.training.schedule import Head
from megarl.tasks.teacher_scores import Pair, Score, Scored
from megarl.train.inference.inference import check_ids
from megarl.train.inference.models import load_teacher


@contextmanager
def path_teachers(config: Config, vocab_size: int, port: int) -> Iterator[Score]:
    """Yield a function that scores rows at temperature 1. It builds each teacher at its first use.

    Args:
        vocab_size: Number of the student's ids.
        port: Free port of the loopback address, for torch's rendezvous.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if config.parallel.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the supervisor does
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    process_groups.initialize(config.parallel, seed=config.trainer.seed)
    built: dict[str, Model] = {}

    def score(name: str, pairs: Sequence[Pair]) -> list[Scored]:
        if name not in built:
            built[name] = _teacher(config, name, vocab_size)
        return _scored(config, name, built[name], vocab_size, pairs)

    try:
        yield score
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _teacher(config: Config, name: str, vocab_size: int) -> Model:
    model, teacher = config.model, config.teachers[name]
    head = Head(vocab_size, 1.0, config.trainer.logits_bytes, model.head_dtype == "float32")
    settings = replace(model, dtype=teacher.dtype or model.dtype, lora=LoraConfig())
    micro_batching = micro_batching_for(config.parallel, config.trainer)
    return load_teacher(Path(str(teacher.path)), settings, config.parallel, head, micro_batching)


def _scored(config: Config, name: str, model: Model, vocab_size: int, pairs: Sequence[Pair]) -> list[Scored]:
    """Return the scores of responses. Raises NonRetryableError for a token without an embedding."""
    assert model.head is not None, "a teacher is a language model"
    sequences, top_k = of_demonstrations(pairs), teacher_top_k(config.algorithm)
    check_ids(sequences, config, name, model)
    both, found = min(vocab_size, model.head.vocab_size), torch.zeros(len(sequences.tokens), 2 * top_k)
    columns = LikeliestTokens(top_k, both) if top_k else None
    batches = [model.micro_batches(sequences)]
    logp = model.outputs(sequences, batches, columns=columns, more=found if top_k else None)
    lengths, kept = [len(response) for _, response in pairs], sequences.mask
    return [
        Scored(TeacherScores(name, own.numpy(), top[:, :top_k].int().numpy(), top[:, top_k:].numpy()), both)
        for own, top in zip(logp[kept].split(lengths), found[kept].split(lengths), strict=True)
    ]
