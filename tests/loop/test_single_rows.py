"""A sequence that decodes alone has the bits that it has among others, in a model wider than 1,024.

oneDNN's product of one row depends on the machine. Held to SSE4.1 it sums one row in another order everywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import RolloutConfig
from megarl.engines.client.client import Sampling
from tests.loop.engines import WIDE_SIZES, some_prompts, tiny_engine
from tests.loop.zygote import Zygote

ROLLOUT = RolloutConfig(
    max_prompt_tokens=32, max_response_tokens=32, max_num_seqs=16, kv_cache_bytes=2**26, start_timeout_s=240.0
)
SAMPLING = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)
LINE = "compute a single row twice"


@pytest.mark.parametrize("isa", ["DEFAULT", "SSE41"])
def test_a_sequence_alone_has_the_bits_of_one_among_others(isa: str, tmp_path: Path, zygote: Zygote) -> None:
    engine = tiny_engine(tmp_path, rollout=ROLLOUT, sizes=WIDE_SIZES)
    engine.zygote, engine.environment = zygote, {"ONEDNN_MAX_CPU_ISA": isa}
    try:
        engine.ready()
        prompts = some_prompts(8)
        alone = [engine.generate([prompt], SAMPLING)[0] for prompt in prompts[:2]]
        for others in (1, 3, 7):
            among = engine.generate(prompts[: others + 1], SAMPLING)
            for one, same in zip(alone, among, strict=False):
                assert one.token_ids.tolist() == same.token_ids.tolist()
                assert np.array_equal(one.logprobs, same.logprobs)
    finally:
        engine.stop()
    written = "".join(path.read_text() for path in engine.logs.glob("*.log"))
    assert isa == "DEFAULT" or LINE in written  # else this shows nothing
