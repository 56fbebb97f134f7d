"""Check of the tokenizer against the model's vocabulary: a token without an embedding ends an engine at the first
request with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from megarl.config import Config
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Preference, Task
from megarl.run.run_dir.rows import Rows, place
from megarl.tasks import ChatTokenizer, Place, encode_demonstrations, encode_preferences, encode_rows, place_of_row

log = logging.getLogger(__name__)


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
