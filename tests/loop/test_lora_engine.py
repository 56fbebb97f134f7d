"""An engine computes with adapters of its own (``sync.adapter=separate``) what transformers and PEFT do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megarl.config.lora import LoraConfig
from megarl.core.errors import EngineError
from megarl.engines.client.client import Sampling
from megarl.engines.sync.link import LinkAddress, join, open_store
from megarl.learn.parallel.grid import megatron_grid
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard.adapters import Factors, adapter_layout, beside, factors_of
from megarl.weights.reshard.execute import merge, send
from megarl.weights.reshard.layouts import VOCAB_MULTIPLE, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import build_plan
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import RunningEngine, some_prompts, tiny_engine, worst_difference
from tests.loop.trainers import checkpoint_tensors, shards
from tests.loop.zygote import Zygote
from tests.parallel import peft_twin

TOLERANCE = 1e-4
LORA = LoraConfig(
    rank=4, alpha=6.0, rank_pattern={"k_proj": 3}, targets=["q_proj", "k_proj", "o_proj", "mlp.up_proj", "down_proj"]
)
"""Not all tensors of a fused layer, and less than the rank 8 that vLLM has room for."""
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)
PROMPTS = some_prompts(count=4, length=70)
"""Two whole blocks each, which the engine keeps in its prefix cache."""


class Trainer:
    """Two ranks of a trainer with adapters, as far as a sync goes."""

    def __init__(self, engine: RunningEngine, lora: LoraConfig) -> None:
        self.engine, config = engine, engine.config
        hf_config = read_hf_config(engine.model_path)
        self.factors = factors_of(hf_config, lora)
        grid = megatron_grid(config.parallel)
        source, destination = megatron_layout(hf_config, grid), vllm_layout(hf_config, config.rollout.tp)
        changed = build_plan(adapter_layout(source, self.factors), adapter_layout(destination, self.factors))
        self.plans = {
            "all": build_plan(beside(source, changed.source), beside(destination, changed.destination)),
            "changed": changed,
        }
        ranks, addresses = source.num_ranks, engine.addresses()
        address = LinkAddress(addresses.link_host, addresses.link_port, "1/0", ranks + config.rollout.tp, 30.0)
        self.info = asdict(address) | {
            "grid": asdict(grid), "transformer_impl": "local", "places": {}, "vocab_multiple": VOCAB_MULTIPLE,
            "kernels": "megarl", "replicas": 1, "replica": 0, "dtype": "float32", "weight_dtype": "auto",
            "bucket_bytes": config.sync.bucket_bytes, "transport": "gloo",
            "fingerprint": self.plans["all"].fingerprint, "lora": asdict(lora), "adapter": "separate",
        }  # fmt: skip
        engine.control.workers("megarl_agree", self.info)
        master = open_store(address, master=True)
        stores = [master, *(open_store(address, master=False) for _ in range(1, ranks))]
        workers = range(config.rollout.tp)
        with ThreadPoolExecutor(ranks + 1) as pool:
            joined = pool.submit(engine.control.init, self.info)
            links = [pool.submit(join, store, address, rank, ranks, workers) for rank, store in enumerate(stores)]
            self.links = [link.result() for link in links]
            joined.result()

    def publish(self, tensors: Mapping[str, torch.Tensor], part: str, version: str) -> dict[str, int]:
        """Send logical tensors; return the digests of what was sent to any worker."""
        control, plan = self.engine.control, self.plans[part]

        def sent(rank: int) -> dict[Any, int]:
            own = shards(dict(tensors), plan.source, rank)
            size = self.engine.config.sync.bucket_bytes
            return send(plan, rank, own, self.links[rank], dtype=torch.float32, bucket_bytes=size)

        control.pause()
        control.start()
        with ThreadPoolExecutor(len(self.links) + 1) as pool:
            update = pool.submit(control.update, {"version": version, "part": part})
            digests = list(pool.map(sent, range(len(self.links))))
            update.result()
        control.finish(version)
        control.reset_prefix_cache()
        control.resume()
        control.refuse(None, version)
        return merge({tensor: digest} for each in digests for (_, tensor), digest in each.items())

    def found(self) -> dict[str, int]:
        """Digests of what the engine's workers compute with."""
        answers = self.engine.control.workers("megarl_digests")
        return merge({name: int(digest, 16) for name, digest in answer.items()} for answer in answers)


class Twin:
    """A model of transformers, and adapters of PEFT on it."""

    def __init__(self, path: Path, lora: LoraConfig, factors: Mapping[str, Factors]) -> None:
        self.path, self.lora, self._factors = path, lora, factors
        self.base = Qwen3ForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self.own = checkpoint_tensors(self.base)

    def adapter(self, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """PEFT's model with random A's and B's, and the tensors that a trainer sends of them: A and scale · B."""
        folder = peft_twin.save_adapter(self.path, self.lora, seed)
        stored = {peft.own_name(name): tensor for name, tensor in load_file(folder / peft.TENSORS).items()}
        for own in self._factors.values():
            stored[own.b] = stored[own.b] * own.scale
        return peft_twin.load(copy.deepcopy(self.base), folder, self.lora).eval(), stored


@contextmanager
def running(folder: Path, zygote: Zygote, tp: int) -> Iterator[RunningEngine]:
    engine = tiny_engine(folder, rollout=replace(TINY_ROLLOUT, tp=tp))
    config = engine.config
    config = replace(config, model=replace(config.model, lora=LORA), sync=replace(config.sync, adapter="separate"))
    engine = replace(engine, config=config, zygote=zygote)
    try:
        yield engine.ready()
    finally:
        engine.stop()


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_an_engine_computes_with_adapters_of_its_own(tmp_path: Path, zygote: Zygote, tp: int) -> None:
    def difference(model: Any) -> float:
        worst = worst_difference(model, PROMPTS, engine.generate(PROMPTS, SAMPLING))
        print(f"worst difference {worst:.2e}")
        return worst

    with running(tmp_path / "engine", zygote, tp) as engine:
        twin = Twin(engine.model_path, LORA, factors_of(read_hf_config(engine.model_path), LORA))
        assert difference(twin.base) < TOLERANCE, "before a trainer joins the adapter is zero"
        engine.control.workers("megarl_check_files")
        trainer = Trainer(engine, LORA)
        first, tensors = twin.adapter(1)
        engine.control.start()
        with pytest.raises(EngineError, match="does not have the rest of the weights"):
            engine.control.update({"version": "1.1", "part": "changed"})
        engine.control.workers("megarl_abandon_update")
        trainer = Trainer(engine, LORA)
        assert trainer.publish(twin.own | tensors, "all", "1.2") == trainer.found()
        assert len(trainer.found()) == len(twin.own) + len(tensors)
        assert difference(twin.base) > 0.05
        assert difference(first) < TOLERANCE
        second, tensors = twin.adapter(2)
        assert trainer.publish(tensors, "changed", "1.3") == trainer.found()
        assert trainer.found().keys() == tensors.keys()
        assert difference(first) > 0.05
        assert difference(second) < TOLERANCE
        engine.control.sleep()
        engine.control.wake("weights")
        trainer.publish(twin.own | tensors, "all", "1.4")
        engine.control.wake("kv_cache")
        assert difference(second) < TOLERANCE
        trainer.publish({name: tensor * (".lora_A" in name) for name, tensor in tensors.items()}, "changed", "1.5")
        assert difference(twin.base) < TOLERANCE
