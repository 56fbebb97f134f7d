"""Memory of vLLM's front end for the tokens of unfinished answers, without an engine."""

from __future__ import annotations

import tracemalloc

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from megarl.rollout.endpoint import _record, sampling_params
from megarl.rollout.frames import Completion

TOKENS = 4096


def queued(processor: OutputProcessor, parameters: SamplingParams) -> RequestOutputCollector:
    request = EngineCoreRequest("a", [1, 2, 3], None, parameters, None, 0.0, None, None, None)
    request.external_req_id = "a"
    queue = RequestOutputCollector(parameters.output_kind, "a")
    processor.add_request(request, None, None, 0, queue)
    return queue


def test_bytes_of_a_token_until_its_answer_ends() -> None:
    processor = OutputProcessor(None, log_stats=False)
    queue = queued(processor, sampling_params({"max_tokens": TOKENS}))
    ids = np.random.default_rng(0).integers(300, 150_000, TOKENS)
    logprobs = -np.random.default_rng(1).random(TOKENS, dtype=np.float32)
    ranks = np.full(1, 3)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            lists = LogprobsLists(token.reshape(1, 1), logprob.reshape(1, 1), ranks, None)
            reason = FinishReason.LENGTH if i == TOKENS - 1 else None
            processor.process_outputs([EngineCoreOutput("a", [int(token)], lists, finish_reason=reason)])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 150 < held / TOKENS < 220, "docs/experiments.md has the number"
    output = queue.get_nowait()
    assert output is not None
    record = _record(0, 0, output, expanded=False)
    assert isinstance(record, Completion)
    assert record.token_ids.tolist() == ids.tolist() and record.logprobs.tobytes() == logprobs.tobytes()
