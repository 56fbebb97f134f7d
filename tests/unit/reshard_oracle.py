"""What every rank must hold, written by hand with cat and chunk: shares no code and no table with megarl.reshard.

Also an in-memory network for running both sides of a plan in threads of one process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

TIMEOUT_S = 20.0
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def qwen3_config(**changes: Any) -> Config:
    return {
        "model_type": "qwen3",
        "vocab_size": 70,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **changes,
    }


@dataclass(frozen=True)
class Case:
    """A model with a trainer grid and an engine that it fits."""

    config: Config
    tp: int
    pp: int
    dp: int
    engine_tp: int
    replicas: int


def engine_sizes(config: Config) -> list[int]:
    heads, kv, ffn = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
    padded = -(-config["vocab_size"] // 64) * 64
    return [
        t for t in range(1, 9) if heads % t == 0 and ffn % t == 0 and padded % t == 0 and (kv % t == 0 or t % kv == 0)
    ]


@st.composite
def configs(draw: st.DrawFn, layers: int | None = None) -> Config:
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    return qwen3_config(
        vocab_size=draw(st.integers(1, 200)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.sampled_from([8, 12, 24])),
        num_hidden_layers=layers or draw(st.integers(1, 4)),
        num_attention_heads=kv * draw(st.sampled_from([1, 2, 3, 4])),
        num_key_value_heads=kv,
        head_dim=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs())
    return Case(
        config,
        tp=draw(st.sampled_from(divisors(gcd(config["num_key_value_heads"], config["intermediate_size"])))),
        pp=draw(st.sampled_from(divisors(config["num_hidden_layers"]))),
        dp=draw(st.integers(1, 2)),
        engine_tp=draw(st.sampled_from(engine_sizes(config))),
        replicas=draw(st.integers(1, 2)),
    )


# ------------------------------------------------------------------ expectations


def random_hf(config: Config, seed: int = 0) -> Tensors:
    """A whole model with random weights."""
    hidden, ffn, vocab, head = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (q, hidden),
            p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden),
            p + "self_attn.q_norm.weight": (head,),
            p + "self_attn.k_norm.weight": (head,),
            p + "self_attn.o_proj.weight": (hidden, q),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "mlp.gate_proj.weight": (ffn, hidden),
            p + "mlp.up_proj.weight": (ffn, hidden),
            p + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def padded(weight: Tensor, multiple: int) -> Tensor:
    extra = -weight.shape[0] % multiple
    return torch.cat([weight, torch.zeros(extra, weight.shape[1])])


def megatron_rank(config: Config, hf: Tensors, tp: int, pp: int, tp_rank: int, stage: int) -> Tensors:
    """GPTModel's parameters on one rank (local spec), vocabulary padded to 64 rows a rank."""
    head, groups = config["head_dim"], config["num_key_value_heads"]
    per_stage = config["num_hidden_layers"] // pp
    out: Tensors = {}

    def cut(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tp, dim)[tp_rank]

    if stage == 0:
        out["embedding.word_embeddings.weight"] = cut(padded(hf["model.embed_tokens.weight"], 64 * tp))
    for local in range(per_stage):
        h, m = f"model.layers.{stage * per_stage + local}.", f"decoder.layers.{local}."
        q, k, v = (hf[h + f"self_attn.{x}_proj.weight"] for x in "qkv")
        by_group = [x.reshape(groups, -1, x.shape[1]) for x in (q, k, v)]
        assert by_group[1].shape[1] == head
        interleaved = torch.cat(by_group, dim=1)
        out |= {
            m + "input_layernorm.weight": hf[h + "input_layernorm.weight"],
            m + "self_attention.linear_qkv.weight": cut(interleaved).reshape(-1, q.shape[1]),
            m + "self_attention.q_layernorm.weight": hf[h + "self_attn.q_norm.weight"],
            m + "self_attention.k_layernorm.weight": hf[h + "self_attn.k_norm.weight"],
            m + "self_attention.linear_proj.weight": cut(hf[h + "self_attn.o_proj.weight"], 1),
            m + "pre_mlp_layernorm.weight": hf[h + "post_attention_layernorm.weight"],
            m + "mlp.linear_fc1.weight": torch.cat(
                [cut(hf[h + "mlp.gate_proj.weight"]), cut(hf[h + "mlp.up_proj.weight"])]
            ),
            m + "mlp.linear_fc2.weight": cut(hf[h + "mlp.down_proj.weight"], 1),
        }
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            out["output_layer.weight"] = cut(padded(hf["lm_head.weight"], 64 * tp))
        elif pp > 1:
            out["output_layer.weight"] = cut(padded(hf["model.embed_tokens.weight"], 64 * tp))
    return {name: tensor.contiguous() for name, tensor in out.items()}


def megatron_grid(config: Config, hf: Tensors, tp: int, pp: int, dp: int) -> list[Tensors]:
    """Rank -> parameters, in Megatron's rank order (tp fastest, then dp, then pp)."""
    return [megatron_rank(config, hf, tp, pp, t, p) for p in range(pp) for _ in range(dp) for t in range(tp)]


def vllm_rank(config: Config, hf: Tensors, tp: int, rank: int) -> Tensors:
    """vLLM's parameters on one worker."""
    kv = config["num_key_value_heads"]
    out: Tensors = {}

    def cut(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tp, dim)[rank]

    def cut_kv(weight: Tensor) -> Tensor:
        copies = max(tp // kv, 1)
        return weight.chunk(min(tp, kv), 0)[rank // copies]

    out["model.embed_tokens.weight"] = cut(padded(hf["model.embed_tokens.weight"], 64))
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        q, k, v = (hf[p + f"self_attn.{x}_proj.weight"] for x in "qkv")
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            out[p + name + ".weight"] = hf[p + name + ".weight"]
        out[p + "self_attn.qkv_proj.weight"] = torch.cat([cut(q), cut_kv(k), cut_kv(v)])
        out[p + "self_attn.o_proj.weight"] = cut(hf[p + "self_attn.o_proj.weight"], 1)
        out[p + "mlp.gate_up_proj.weight"] = torch.cat(
            [cut(hf[p + "mlp.gate_proj.weight"]), cut(hf[p + "mlp.up_proj.weight"])]
        )
        out[p + "mlp.down_proj.weight"] = cut(hf[p + "mlp.down_proj.weight"], 1)
    out["model.norm.weight"] = hf["model.norm.weight"]
    head = hf["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    out["lm_head.weight"] = cut(padded(head, 64))
    return {name: tensor.contiguous() for name, tensor in out.items()}


def assert_same(got: Tensors, expected: Tensors, dtype: torch.dtype = torch.float32) -> None:
    """Bitwise, after the cast to ``dtype``; also the same names."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.to(dtype)), name


def unwritten(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Tensors:
    """Local tensors full of NaN: an element that nobody writes is unequal to everything."""
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


# ------------------------------------------------------------------ a network in one process


class Network:
    """Rendezvous between threads. A message is read from the sender's buffer only when it is received, so that a sender that
    reuses a buffer too early delivers wrong data; ``alive`` counts a sender's messages that were not waited for."""

    def __init__(self, corrupt: Callable[[int, int, int, Tensor], None] | None = None) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[tuple[Tensor, threading.Event]]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.alive: dict[int, int] = defaultdict(int)
        self.most_alive = 0
        self.largest_bytes = 0
        self.messages: dict[tuple[int, int], int] = defaultdict(int)
        self.corrupt = corrupt
        self.failed = threading.Event()

    def sleep(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``; an error in any thread ends the wait."""
        deadline = time.monotonic() + TIMEOUT_S
        while not ready():
            assert not self.failed.is_set(), f"{what}: another rank failed"
            assert time.monotonic() < deadline, f"{what}: nothing came"

    def port(self, rank: int) -> Port:
        return Port(self, rank)

    def queue(self, link: tuple[int, int]) -> queue.Queue[tuple[Tensor, threading.Event]]:
        with self.lock:
            return self.queues[link]


@dataclass
class Sent:
    network: Network
    rank: int
    event: threading.Event

    def wait(self) -> None:
        self.network.sleep(lambda: self.event.wait(0.1), f"source rank {self.rank} sending")
        with self.network.lock:
            self.network.alive[self.rank] -= 1


@dataclass
class Port:
    """The Transport of one rank."""

    network: Network
    rank: int

    def isend(self, tensor: Tensor, rank: int) -> Sent:
        assert tensor.dim() == 1 and tensor.is_contiguous()
        event = threading.Event()
        net = self.network
        with net.lock:
            net.alive[self.rank] += 1
            net.most_alive = max(net.most_alive, net.alive[self.rank])
            net.largest_bytes = max(net.largest_bytes, tensor.numel() * tensor.element_size())
        net.queue((self.rank, rank)).put((tensor, event))
        return Sent(net, self.rank, event)

    def recv(self, tensor: Tensor, rank: int) -> None:
        net = self.network
        inbox = net.queue((rank, self.rank))
        arrived: list[tuple[Tensor, threading.Event]] = []

        def ready() -> bool:
            with contextlib.suppress(queue.Empty):
                arrived.append(inbox.get(timeout=0.1))
            return bool(arrived)

        net.sleep(ready, f"destination rank {self.rank} waiting for {rank}")
        sent, event = arrived[0]
        assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
        tensor.copy_(sent)
        if net.corrupt is not None:
            with net.lock:
                count = net.messages[(rank, self.rank)]
                net.messages[(rank, self.rank)] += 1
            net.corrupt(rank, self.rank, count, tensor)
        event.set()


def run_threads(network: Network, jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all jobs at once; their results in order, or the first error of any."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)
            network.failed.set()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S + 5)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return results
