"""Expert rows against the model, its tokenizer and what is held out, before they are written into a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.core.config import Config
from megarl.explore.store import ExpertExperience
from megarl.explore.tasksets import ChatTokenizer
from megarl.run.checks.inputs import check_held_out, check_lengths
from megarl.run.checks.vocabulary import check_vocabulary
from megarl.run.run_dir.experts import from_source
from megarl.run.run_dir.rows import read_split
from megarl.weights.checkpoint.formats.hf_source import read_hf_config


class ExpertCheck:
    """Checks that a job makes of its expert rows, for rows of any source."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = ChatTokenizer.of(config)
        self._hf_config = read_hf_config(Path(config.model.path))
        self._held_out = read_split(config, "eval")

    def rows(self, source: str, experts: Sequence[ExpertExperience]) -> None:
        """Check the rows of one source. Raises DataError with the source and the row."""
        config, rows = from_source(self._config, source), [expert.task for expert in experts]
        check_held_out(config, self._held_out, {"expert": rows})
        vocabulary = int(self._hf_config["vocab_size"])
        check_vocabulary(config, {"expert": rows}, self._tokenizer, vocabulary, sampled=())
        check_lengths(config, "expert", rows, self._tokenizer, int(self._hf_config["max_position_embeddings"]))
