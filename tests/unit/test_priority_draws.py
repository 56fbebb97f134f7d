"""Tasks drawn by the results of earlier steps."""

from __future__ import annotations

import numpy as np

from megarl.buffer.order.draws import PRIORITY
from megarl.buffer.order.group_choice import Draw, prioritized
from megarl.train.parts.priority_draws import drawn


def test_prioritized_tasks_are_those_of_the_steps() -> None:
    ids, shares = [f"train/{i}" for i in range(20)], {"train/3": 1.0, "train/7": 0.5}
    weights = np.array([1.0 - shares.get(task, 0.0) + 0.1 for task in ids])
    numbers = prioritized(weights, Draw(4, 0, 8, 0, 11, ()))
    assert drawn(ids, shares, 0.1, [11, 4, PRIORITY])[:8] == [ids[i] for i in numbers]
    assert drawn(ids, {}, 0.1, [11, 4, PRIORITY]) != drawn(ids, {"train/3": 1.0}, 0.1, [11, 4, PRIORITY])
