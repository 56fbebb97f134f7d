"""A judge on an engine of ours: vLLM's chat endpoint after the job's key."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from megarl.config.rewards import JudgeConfig
from megarl.core.errors import ConfigError
from megarl.rewards.judge.judge import KEY_VARIABLE, Judge, check_judge
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import EOS, KEY, RunningEngine, tiny_engine
from tests.loop.zygote import Zygote

WORDS = ("yes", "half", "loop", "Verdict:", "correct", "Score:", "5/10", "it", "says", "7")
NEXT = {
    "yes": "Verdict:", "Verdict:": "correct", "correct": None,
    "half": "Score:", "Score:": "5/10", "5/10": None,
    "loop": "it", "it": "says", "says": "it",
}  # fmt: skip
"""What the model says after each word; None ends its reply."""


def save_judge(path: Path) -> None:
    """Makes the tiny model of ``path`` one that follows ``NEXT``: its layers add nothing, its head looks the last word
    up."""
    ids = {"<pad>": 0, "<bos>": 1, "<eos>": EOS, **{word: i for i, word in enumerate(WORDS, 3)}}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(path)
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.copy_(torch.randint(0, 2, embedding.shape, generator=generator) * 2.0 - 1.0)
        head.zero_()
        for word, following in NEXT.items():
            head[EOS if following is None else ids[following]] += embedding[ids[word]]
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    running = tiny_engine(tmp_path_factory.mktemp("judge"), rollout=TINY_ROLLOUT)
    save_judge(running.model_path)
    running.zygote = zygote
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.fixture
def config(tmp_path: Path) -> JudgeConfig:
    """The reference is the prompt's end, so its last word decides what this judge says."""
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("{question}\n{answer}\n{reference}")
    return JudgeConfig(url="rollout", rubric=str(rubric), max_tokens=12, cache=str(tmp_path / "cache.db"))


def ask(
    config: JudgeConfig, engines: list[str], key: str | None, references: list[str]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    async def main() -> tuple[list[dict[str, Any]], dict[str, int]]:
        async with Judge(config, lambda: engines, key) as judge:
            results = await asyncio.gather(
                *(judge.score("7", reference, question="3 + 4 ?") for reference in references)
            )
            return results, dict(judge.counts)

    return asyncio.run(main())


def test_the_jobs_own_engine_judges(engine: RunningEngine, config: JudgeConfig) -> None:
    results, counts = ask(config, [engine.url], KEY, ["yes", "half", "loop", "7"])
    assert [(result["status"], result["score"]) for result in results] == [
        ("ok", 1.0),
        ("wrong", 0.5),
        ("error", 0.0),
        ("error", 0.0),
    ]
    assert "it says it says" in results[2]["reason"]
    # The last two were asked again; then, for each, the judge was asked twice about no answer.
    assert counts["requests"] == 10 and counts["completion_tokens"] > 24
    stored = sqlite3.connect(str(config.cache)).execute("SELECT replies FROM judgements").fetchall()
    assert sorted([reply.strip() for reply in json.loads(row[0])] for row in stored) == [
        ["Score: 5/10"],
        ["Verdict: correct"],
    ]
    again, counts = ask(config, [engine.url], KEY, ["yes", "half"])
    assert all(result["cached"] for result in again) and "requests" not in counts


def test_votes_are_seeded_requests(engine: RunningEngine, config: JudgeConfig) -> None:
    voting = JudgeConfig(url="rollout", rubric=config.rubric, max_tokens=12, cache=None, votes=3, temperature=1.0)
    [result], counts = ask(voting, [engine.url], KEY, ["yes"])
    assert (result["status"], result["votes_for"], counts["requests"]) == ("ok", 3, 3)


def test_without_the_key_the_engine_refuses(engine: RunningEngine, config: JudgeConfig) -> None:
    [result], _ = ask(config, [engine.url], "another key", ["yes"])
    assert result["status"] == "error" and "answered 401" in result["reason"]


def test_an_engine_as_a_server_of_its_own(
    engine: RunningEngine, config: JudgeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    url = f"{engine.url}/v1"
    check_judge(JudgeConfig(url=url, rubric=config.rubric), context_tokens=192)
    check_judge(JudgeConfig(url=url, model="policy"), context_tokens=192)
    with pytest.raises(ConfigError, match="'gpt' is not at .*, which has policy"):
        check_judge(JudgeConfig(url=url, model="gpt"), context_tokens=192)
    own = JudgeConfig(url=url, rubric=config.rubric, max_tokens=12, cache=None)
    [result], counts = ask(own, [], None, ["yes"])
    assert result["status"] == "ok" and counts["requests"] == 2  # one for the model's name
    too_long = JudgeConfig(url=url, model="policy", max_tokens=100_000, cache=None)
    [result], _ = ask(too_long, [], None, ["yes"])
    assert result["status"] == "error" and "answered 400" in result["reason"] and "192" in result["reason"]
