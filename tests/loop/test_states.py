"""Responses of models whose layers keep a state: the same, however the engine came to have the state of a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.frames import Completion
from tests.loop.engines import perturbed
from tests.loop.test_segments import TOKENS, respond
from tests.loop.test_sync_families import TP2, Cell, engine_of
from tests.loop.under_way import OPTIONS, hold
from tests.loop.zygote import Zygote

GREEDY = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
NUMBER = 24
CELLS = {Cell("lfm2", TP2): 1e-5, Cell("qwen3_5", TP2, dtype="bfloat16"): 0.03}
"""Largest difference of log-probs: 2e-6 and 0.016 were measured."""


def prompts_with(second: int) -> list[Prompt]:
    return [Prompt([1, second, *((i * 17 + j * 5) % 190 + 4 for j in range(18))]) for i in range(NUMBER)]


def differing(found: Sequence[Completion], wanted: Sequence[Completion], within: float) -> list[int]:
    """Numbers of the responses whose log-probs differ by more, up to and with the first token that is another one:
    two tokens may be as likely."""
    numbers = []
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        places = np.flatnonzero(one.token_ids != other.token_ids)
        end = int(places[0]) + 1 if places.size else TOKENS
        if np.abs(one.logprobs[:end] - other.logprobs[:end]).max() > within:
            numbers.append(i)
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=pytest.mark.soak if cell.family == "lfm2" else ()) for cell in CELLS], ids=str
)
def test_states_are_those_of_an_uncut_response(cell: Cell, tmp_path: Path, zygote: Zygote) -> None:
    prompts, within = prompts_with(7), CELLS[cell]
    with engine_of(cell, tmp_path, zygote, OPTIONS) as (engine, ranks, model), ThreadPoolExecutor(1) as thread:
        ranks.publish_whole(perturbed(model, 1))
        uncut = [one for prompt in prompts for one in engine.generate([prompt], GREEDY)]
        assert not differing(engine.generate(prompts, GREEDY), uncut, within)  # prompts seen before, in one batch

        evicted = thread.submit(engine.generate, prompts, GREEDY)
        held = hold(engine, evicted, running=NUMBER // 2)
        engine.control.reset_prefix_cache(running=True)  # as a sync does with sync.pause=keep
        engine.control.resume()
        assert not differing(evicted.result(60), uncut, within) and held

        cut = respond(engine, prompts, 7, 0.0, {})  # each segment is a request, whose prompt has those before
        assert not differing([cut[i][0] for i in range(NUMBER)], uncut, within)
        assert len(differing(engine.generate(prompts_with(8), GREEDY), uncut, within)) > NUMBER // 2  # another token
