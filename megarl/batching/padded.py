"""Right-padded rows: token ids, shifted targets and per-token values in [N, S] arrays.

Position i of a row holds the log-prob, mask and advantage of the token at i+1, because logits at i predict it.
Shape legend: N rows, S padded sequence length, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megarl.schema import Experience

IGNORED = -100


@dataclass
class Rows:
    """A batch of sequences; per-token arrays are aligned with the position that predicts the token.

    ``old_logp`` and ``ref_logp`` are filled by the inference phase and only on ranks of the last pipeline stage.
    """

    tokens: torch.Tensor
    """int64 [N, S]"""
    mask: torch.Tensor
    """bool [N, S]; positions whose next token is in the loss."""
    advantages: torch.Tensor | None = None
    engine_logp: torch.Tensor | None = None
    old_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """Apply ``function(tensor) -> tensor`` to every array that is set."""
        values: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            values[f.name] = None if value is None else function(value)
        return Rows(**values)

    def select(self, index: torch.Tensor) -> Rows:
        """Rows at ``index`` (int64); -1 makes a dummy row that is masked out everywhere."""
        picked = self.map(lambda x: x[index.clamp(min=0)])
        return replace(picked, mask=picked.mask & (index >= 0)[:, None])

    @property
    def targets(self) -> torch.Tensor:
        """int64 [N, S]: the next token where it is in the loss, ``IGNORED`` elsewhere."""
        targets = torch.full_like(self.tokens, IGNORED)
        targets[:, :-1] = self.tokens[:, 1:]
        return targets.masked_fill(~self.mask, IGNORED)


MicroBatch = Rows


def _stack(sequences: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], pad_id: int, multiple: int) -> Rows:
    length = max(len(p) + len(r) for p, r, _ in sequences)
    length += -length % multiple
    tokens = np.full((len(sequences), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(sequences), length), dtype=bool)
    for i, (prompt, response, response_mask) in enumerate(sequences):
        tokens[i, : len(prompt)] = prompt
        tokens[i, len(prompt) : len(prompt) + len(response)] = response
        mask[i, len(prompt) - 1 : len(prompt) + len(response) - 1] = response_mask
    return Rows(torch.from_numpy(tokens), torch.from_numpy(mask))


def stack_demonstrations(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, pad_id: int, multiple: int = 1) -> Rows:
    """Prompt and response ids to ``Rows``; the loss is on the whole response. S is rounded up to ``multiple``."""
    return _stack([(p, r, np.ones(len(r), dtype=bool)) for p, r in pairs], pad_id, multiple)


def stack_experiences(
    experiences: Sequence[Experience], advantages: Sequence[float], *, pad_id: int, multiple: int = 1
) -> Rows:
    """Experiences and their per-sequence advantages to ``Rows``. S is rounded up to ``multiple``."""
    rows = _stack([(e.prompt_ids, e.response_ids, e.response_mask) for e in experiences], pad_id, multiple)
    engine_logp = np.zeros(rows.tokens.shape, dtype=np.float32)
    for i, e in enumerate(experiences):
        start = len(e.prompt_ids) - 1
        engine_logp[i, start : start + len(e.response_ids)] = e.engine_logp
    rows.engine_logp = torch.from_numpy(engine_logp)
    rows.advantages = torch.tensor(advantages, dtype=torch.float32)[:, None].expand(rows.tokens.shape).contiguous()
    return rows


def response_values(values: torch.Tensor, experiences: Sequence[Experience]) -> list[np.ndarray]:
    """Per-token values [N, S] of ``stack_experiences(experiences)`` as one array [R] per response."""
    starts = [len(e.prompt_ids) - 1 for e in experiences]
    return [
        row[start : start + len(e.response_ids)]
        for row, start, e in zip(values.cpu().numpy(), starts, experiences, strict=True)
    ]


def shard(num_rows: int, updates: int, dp: int, micro_batch_size: int) -> list[list[torch.Tensor]]:
    """Row numbers of every update and data-parallel rank: ``result[update][dp_rank]``, int64, padded with -1.

    Rows are split in order into ``updates`` equal parts (fewer when there are fewer rows), and each part is dealt to the ranks in turn. All ranks of
    an update get the same number of rows, a multiple of ``min(micro_batch_size, rows)``, so that none waits in a
    collective that another never enters.
    """
    updates = min(updates, num_rows)
    result = []
    for u in range(updates):
        part = torch.arange(u * num_rows // updates, (u + 1) * num_rows // updates)
        per_rank = -(-len(part) // dp)
        size = min(micro_batch_size, per_rank)
        padded = torch.full((dp, per_rank + -per_rank % size), -1)
        for d in range(dp):
            mine = part[d::dp]
            padded[d, : len(mine)] = mine
        result.append(list(padded))
    return result


def micro_batches(rows: Rows, micro_batch_size: int) -> list[MicroBatch]:
    """Cut rows of ``shard`` into equally shaped micro-batches."""
    size = min(micro_batch_size, len(rows))
    assert len(rows) % size == 0, f"{len(rows)} rows are no multiple of {size}: make them with shard()"
    starts = range(0, len(rows), size)
    return [rows.map(partial(torch.narrow, dim=0, start=start, length=size)) for start in starts]
