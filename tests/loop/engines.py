"""Tiny engines for the tests of this folder: seeded models, a real server process, and transformers as the oracle."""

from __future__ import annotations

import asyncio
import copy
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megarl.config.job import RunConfig, SyncConfig
from megarl.config.schema import Config, ModelConfig, ParallelConfig, RolloutConfig
from megarl.core.processes.machine import group_members
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.control import EngineControl
from megarl.engines.client.frames import Completion
from megarl.engines.client.leftovers import own_folder, shared_memory
from megarl.engines.client.names import JobAddresses
from megarl.run.nodes.node import remove
from megarl.run.process import ports
from megarl.run.process.process import Child
from megarl.run.supervise.process_specs import engine_process
from tests.engine_rows import choice_of
from tests.loop.zygote import Forked, Zygote

VOCAB = 200  # not a multiple of 64: both sides pad it, each in its own way
EOS = 2
BUFFERS = "correction_bias", "layer_scalar"
"""Ends of the names of weights that transformers keeps as buffers."""
KEY = "the key of this test"
HOST = "127.0.0.1"

WIDE_SIZES = {
    "hidden_size": 1536,
    "intermediate_size": 1600,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "head_dim": 128,
}
"""Of a Qwen3 above 1,024 columns."""


def save_tokenizer(path: Path) -> None:
    """A word for every token id below VOCAB."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": EOS, **{f"t{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def save_tiny_qwen3(
    path: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """An HF checkpoint directory with a word-level tokenizer; weights are far from a symmetric start. ``sizes``: others
    than usual."""
    save_tokenizer(path)
    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    config = Qwen3Config(
        **(usual | dict(sizes or {})),
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(path)
    return path


def perturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same architecture with other weights (some are buffers)."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    tensors = dict(other.named_parameters())
    tensors |= {name: buffer for name, buffer in other.named_buffers() if name.endswith(BUFFERS)}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return other


@torch.no_grad()
def transformers_logp(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """fp32 [len(response)]: log-probs of the response's tokens as transformers computes them, at temperature 1."""
    tokens = torch.tensor([[*prompt, *response]])
    logp = model(tokens).logits.float().log_softmax(-1)[0]
    at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    return logp[at, tokens[0, at + 1]]


def worst_difference(model: PreTrainedModel, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> float:
    """Largest |engine's log-prob - transformers'| over all sampled tokens."""
    return float(differences(model, prompts, completions).max())


def differences(model: PreTrainedModel, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """|engine's log-prob - transformers'| of every sampled token."""
    expected = [transformers_logp(model, prompts[c.request].token_ids, c.token_ids.tolist()) for c in completions]
    return torch.cat([(torch.from_numpy(c.logprobs) - e).abs() for c, e in zip(completions, expected, strict=True)])


def some_prompts(count: int = 8, length: int = 9, n: int = 1) -> list[Prompt]:
    """Prompts that differ from each other in every token but the first."""
    return [
        Prompt([1, *((i * 17 + j * 5) % 190 + 4 for j in range(length - 1))], n, seed=1000 * i) for i in range(count)
    ]


@dataclass
class RunningEngine:
    """A server process that the tests of a module share; ``ready`` starts another when a test has killed it."""

    config: Config
    logs: Path
    zygote: Zygote | None = None
    """Forks the server from there, instead of starting it as a job does."""
    options: Sequence[str] = ()
    """More of vLLM's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of it."""
    _child: Child | Forked | None = None
    _url: str = ""
    _last_pid: int = -1
    _segments: set[Path] = field(default_factory=set)
    _folder: Path | None = None
    """Its temporary one."""

    def ready(self) -> RunningEngine:
        if self._child is None or self._child.poll() is not None:
            self.stop()
            [port] = ports.choose(HOST, 1, None)
            config = self.config
            argv, environment = engine_process(
                config.model.path,
                config.rollout,
                config.model,
                HOST,
                port,
                pause=config.sync.pause,
                adapter=config.sync.adapter,
            )
            self._folder, own = own_folder()
            self._child = self._start([*argv, *self.options], {**environment, **own}, self.logs / f"engine_{port}.log")
            self._url = f"http://{HOST}:{port}"
            self.control.wait_ready(self.config.rollout.start_timeout_s, alive=lambda: self._child.poll() is None)
            self._segments = shared_memory(self._child.pid)
        return self

    def _start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child | Forked:
        environment = {**environment, **self.environment, "MEGARL_JOB_KEY": KEY}
        return (
            Child("engine", argv, environment, log)
            if self.zygote is None
            else self.zygote.start(argv, environment, log)
        )

    @property
    def model_path(self) -> Path:
        return Path(self.config.model.path)

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def control(self) -> EngineControl:
        return EngineControl(self._url, KEY, log=self._child.log if self._child else None)

    def addresses(self) -> JobAddresses:
        [port] = ports.choose(HOST, 1, None)
        return JobAddresses(HOST, port, KEY)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        """All samples, ordered by prompt and index."""

        async def collect() -> list[Completion]:
            async with EngineClient(choice_of(self._url), KEY, timeout_s=60) as client:
                return [c async for c in client.generate(prompts, sampling)]

        return sorted(asyncio.run(collect()), key=lambda c: (c.request, c.index))

    def stop(self) -> None:
        if self._child is None:
            return
        self._last_pid = self._child.pid
        self._child.signal(signal.SIGTERM)
        self._child.wait(10)
        self._child.signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while group_members(self._child.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        remove(self._folder)
        self._child = self._folder = None

    def leftovers(self) -> list[str]:
        """Processes and shared-memory files that outlived ``stop``."""
        return [str(pid) for pid in group_members(self._last_pid)] + [str(s) for s in self._segments if s.exists()]


def tiny_engine(
    directory: Path,
    *,
    rollout: RolloutConfig,
    tied: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    sizes: Mapping[str, int] | None = None,
) -> RunningEngine:
    """An engine of a tiny model under ``directory``, with the settings of a trainer with tp=2; not started."""
    shutil.rmtree(directory, ignore_errors=True)
    path = save_tiny_qwen3(directory / "model", tied=tied, dtype=getattr(torch, dtype), sizes=sizes)
    config = Config(
        run=RunConfig(dir=str(directory)),
        model=ModelConfig(path=str(path), dtype=dtype),
        parallel=ParallelConfig(tp=2),
        rollout=rollout,
        # Small buckets, so that a publication is many of them.
        sync=SyncConfig(bucket_bytes=16384, timeout_s=30.0),
    )
    return RunningEngine(config, directory / "logs")
