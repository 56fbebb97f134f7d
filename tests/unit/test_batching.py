"""Rows, shards and micro-batches: every row trained exactly once, everywhere the same shapes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batching import micro_batches, response_values, shard, stack_demonstrations, stack_experiences
from megarl.schema import Experience, Reward


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 16))
def test_shard_deals_every_row_once(num_rows: int, updates: int, dp: int, micro: int) -> None:
    plan = shard(num_rows, updates, dp, micro)
    rows = torch.cat([part for update in plan for part in update])
    assert sorted(rows[rows >= 0].tolist()) == list(range(num_rows))
    for update in plan:
        assert len({len(part) for part in update}) == 1  # ranks agree on the number of micro-batches
        assert all(len(part) % min(micro, len(part)) == 0 for part in update if len(part))


def test_values_sit_where_their_token_is_predicted() -> None:
    def experience(prompt: list[int], response: list[int], mask: list[bool]) -> Experience:
        return Experience(
            rollout_id="r",
            task_id="t",
            group_id="g",
            index=0,
            group_size=1,
            prompt_ids=np.array(prompt, dtype=np.int32),
            response_ids=np.array(response, dtype=np.int32),
            response_mask=np.array(mask),
            engine_logp=-np.array(response, dtype=np.float32),
            reward=Reward(1.0, "ok"),
            segments=(),
            finish_reason="stop",
        )

    experiences = [experience([5, 6, 7], [8, 9], [True, True]), experience([5], [6, 7, 8], [True, False, True])]
    rows = stack_experiences(experiences, [2.0, -1.0], pad_id=0, multiple=4)
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [5, 6, 7, 8, 0, 0, 0, 0]]
    assert rows.targets.tolist() == [[-100, -100, 8, 9, -100, -100, -100, -100], [6, -100, 8, -100, -100, -100, -100, -100]]
    assert rows.engine_logp is not None and rows.advantages is not None
    assert rows.engine_logp[0, 2:4].tolist() == [-8, -9]
    assert rows.advantages[1].unique().tolist() == [-1.0]
    assert [v.tolist() for v in response_values(rows.engine_logp, experiences)] == [[-8, -9], [-6, -7, -8]]
    picked = rows.select(torch.tensor([1, -1]))
    assert picked.mask.sum(1).tolist() == [2, 0]
    assert picked.tokens[0].tolist() == rows.tokens[1].tolist()


def test_micro_batches_cover_rows_in_order() -> None:
    rows = stack_demonstrations([(np.array([1, 2]), np.array([i])) for i in range(6)], pad_id=0)
    parts = micro_batches(rows, 2)
    assert torch.cat([p.tokens for p in parts]).equal(rows.tokens)
    assert rows.mask.sum() == 6
