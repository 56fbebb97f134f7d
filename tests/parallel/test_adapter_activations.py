"""The estimate of activations of a model with adapters, against the tensors that autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from tests.parallel.families import VOCAB, save
from tests.parallel.grid import run_grid

TOKENS = 4 * 16
ENDS = LoraConfig(rank=12, targets=["all-linear", "embed_tokens"])
KINDS = {"whole": LoraConfig(), "rank 6": LoraConfig(rank=6), "rank 12": LoraConfig(rank=12), "embedding": ENDS}
CUT = ParallelConfig(tp=2, sequence_parallel=True)
CASES = [("qwen3", ParallelConfig(tp=2)), ("qwen3", CUT), ("deepseek_v3", CUT)]


def kept_bytes(rank: int, folder: str) -> list[dict[str, int]]:
    """Runs in each rank: of every case, kind of training -> bytes of the storages that autograd keeps in one
    micro-batch, parameters left out."""
    from megatron.core import parallel_state

    from megarl.config.algorithms import AlgorithmConfig
    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from tests.parallel.batches import sequences_of

    found = []
    for family, parallel in CASES:
        process_groups.initialize(parallel, seed=1)
        of_case = {}
        for kind, lora in KINDS.items():
            path = Path(folder) / family
            model = TrainedModel(
                hf.read_hf_config(path),
                ModelConfig(path=str(path), lora=lora),
                parallel,
                Head(VOCAB),
                micro_batching_for(parallel, TrainerConfig(packing=False, micro_batch_size=4)),
                OptimizerConfig(lr=1e-3),
            )
            model.model.load_hf(path)
            g = torch.Generator().manual_seed(1)
            tokens, mask = torch.randint(2, VOCAB, (4, 16), generator=g), torch.ones(4, 16, dtype=torch.bool)
            mask[:, -1] = False
            rows = sequences_of(tokens, mask)
            own = {p.untyped_storage()._cdata for chunk in model.model.chunks for p in chunk.parameters()}
            kept: dict[int, Any] = {}

            def keep(tensor: Any, own: set[int] = own, kept: dict[int, Any] = kept) -> Any:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage  # alive, so that no other gets its number
                return tensor

            objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model.backward(rows, model.model.micro_batches(rows), objective)
            of_case[kind] = sum(storage.nbytes() for storage in kept.values())
        found.append(of_case)
        parallel_state.destroy_model_parallel()
    return found


def test_adapters_keep_what_they_are_estimated_to(tmp_path: Path) -> None:
    """Unfused norms keep less where their weights are frozen, so that beside whole training the estimate is high."""
    from megarl.learn.memory.activation_bytes import activation_bytes
    from megarl.weights.architectures import architecture
    from megarl.weights.checkpoint.formats import hf

    for family in {family for family, _ in CASES}:
        save(family, tmp_path / family, num_hidden_layers=2)
    ranks = run_grid(2, kept_bytes, str(tmp_path))
    for number, (family, parallel) in enumerate(CASES):
        hf_config = hf.read_hf_config(tmp_path / family)
        sizes = architecture(hf_config).sizes(hf_config)
        estimate = {
            kind: activation_bytes(sizes, ModelConfig(lora=lora), parallel, TOKENS) for kind, lora in KINDS.items()
        }
        for rank in ranks:
            measured = rank[number]
            of_embedding = estimate["embedding"] - estimate["rank 12"]
            assert measured["embedding"] - measured["rank 12"] == of_embedding > 0, (family, parallel)
            more = estimate["rank 12"] - estimate["rank 6"]
            assert measured["rank 12"] - measured["rank 6"] == more > 0, (family, parallel)
            assert measured["rank 6"] - measured["whole"] <= estimate["rank 6"] - estimate["whole"], (family, parallel)
