"""Scores of given rows by teachers with a path, computed by this process as the only rank (``megarl data teach``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megarl import ops
from megarl.config import Config
from megarl.config.algorithms import teacher_top_k
from megarl.core.schema import TeacherScores
from megarl.learn import algorithms
from megarl.learn.batching import of_demonstrations
from megarl.learn.models.teaching import LikeliestTokens
from megarl.learn.parallel import process_groups
from megarl.learn.training.model import Model
from megarl.tasks.teacher_scores import Pair, Score, Scored
from megarl.train.inference.inference import check_ids
from megarl.train.inference.models import Models


@contextmanager
def path_teachers(config: Config, port: int) -> Iterator[Score]:
    """Yield a function that scores rows at temperature 1. It builds each teacher at its first use.

    Args:
        port: Free port of the loopback address, for torch's rendezvous.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if config.parallel.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the supervisor does
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    process_groups.initialize(config.parallel, seed=config.trainer.seed)
    models, built = Models(config, algorithms.get("sft")), dict[str, Model]()

    def score(name: str, pairs: Sequence[Pair]) -> list[Scored]:
        if name not in built:
            built[name] = models.teacher(name)
        return _scored(models, name, built[name], pairs)

    try:
        yield score
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _scored(models: Models, name: str, model: Model, pairs: Sequence[Pair]) -> list[Scored]:
    """Return the scores of responses. Raises NonRetryableError for a token without an embedding."""
    assert model.head is not None, "a teacher is a language model"
    sequences, top_k = of_demonstrations(pairs), teacher_top_k(models.config.algorithm)
    check_ids(sequences, models.config, name, model)
    vocab_size, columns, more = min(models.head.vocab_size, model.head.vocab_size), None, torch.zeros(0)
    if top_k:
        columns, more = LikeliestTokens(top_k, vocab_size), torch.zeros(len(sequences.tokens), 2 * top_k)
    batches = [model.micro_batches(sequences)]
    logp = model.outputs(sequences, batches, columns=columns, more=more if top_k else None)
    lengths = [len(response) for _, response in pairs]
    kept = sequences.mask
    found = torch.zeros(int(kept.sum()), 0) if not top_k else more[kept]
    parts = zip(logp[kept].split(lengths), found.split(lengths), strict=True)
    return [
        Scored(TeacherScores(name, own.numpy(), top[:, :top_k].int().numpy(), top[:, top_k:].numpy()), vocab_size)
        for own, top in parts
    ]
