"""Checks of expert rows against the model, its tokenizer and held-out rows, before they are written into a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.buffer.store import ExpertExperience
from megarl.config import Config
from megarl.config.algorithms import reads_teacher
from megarl.core.errors import DataError
from megarl.run.checks.inputs import check_held_out, check_lengths
from megarl.run.checks.models.distillation import check_taught_experts
from megarl.run.checks.models.vision import check_image_files_of, check_images, check_patches
from megarl.run.checks.models.vocabulary import check_vocabulary
from megarl.run.run_dir.experts import from_source
from megarl.run.run_dir.rows import place, processor_of, read_split
from megarl.tasks import ChatTokenizer, encode_demonstrations, tokenizer_digest
from megarl.weights.checkpoint.formats.hf_source import read_hf_config


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
