"""Score models through the trainer's own way: packed and padded sequences, context parallelism, interleaved stages.

Scores of every position and all gradients against transformers' ...ForSequenceClassification on each sequence by
itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.parallel.families import VOCAB
from tests.parallel.grid import run_grid
from tests.parallel.test_value_head import TOLERANCE, hf_classifier

SP = ParallelConfig(tp=2, sequence_parallel=True)
GRIDS = {
    "cp2": ParallelConfig(cp=2),
    "tp2-sp": SP,
    "dp2": ParallelConfig(dp=2),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
}
CASES = [(grid, packed) for grid in GRIDS for packed in (False, True)]
IDS = [f"{grid}-{'packed' if packed else 'padded'}" for grid, packed in CASES]
LENGTHS = [5, 17, 1, 24, 9, 12, 30, 3]


def flat() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [T], lengths [N], weights [T] of a loss that is linear in the scores."""
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)
    tokens = torch.randint(2, VOCAB, (total,), generator=generator)
    return tokens, torch.tensor(LENGTHS), torch.randn(total, generator=generator) / total


def on_grids(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Case -> scores [T]; writes ``gradients-{case}``."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megarl.learn.batching import MicroBatching, Sequences
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import Model
    from megarl.learn.training.schedule import run
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan

    tokens, lengths, weights = flat()
    sequences = Sequences(tokens, lengths, torch.zeros(len(tokens), dtype=torch.bool))
    path, found = Path(folder) / "model", {}
    hf_config = hf.read_hf_config(path)
    for (grid, packed), case in zip(CASES, IDS, strict=True):
        parallel = GRIDS[grid]
        process_groups.initialize(parallel, seed=1)
        micro_batching = MicroBatching(
            dp=parallel.dp,
            cp=parallel.cp,
            multiple=2 if parallel.sequence_parallel else 1,
            chunks=2 if parallel.vpp > 1 else 1,
            max_tokens=40 if packed else None,
            rows=2,
        )
        model = Model(hf_config, ModelConfig(path=str(path)), parallel, None, micro_batching)
        model.load_hf(path)
        batches = model.micro_batches(sequences)
        assert len(batches) > 1
        found[case] = model.outputs(sequences, [batches])
        config: Any = unwrap(model.chunks[0]).config
        ddp = [
            DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), c)
            for c in model.chunks
        ]
        for chunk in ddp:
            chunk.zero_grad_buffer()
            chunk.train()

        def loss(batch: Any, answers: torch.Tensor) -> Any:
            return (answers[..., 0] * batch.take(weights)).sum(), None

        run(ddp, sequences, batches, None, loss, forward_only=False)
        for chunk in ddp:
            for parameter in unwrap(chunk).parameters():
                parameter.data.copy_(parameter.main_grad)  # where ``tensors`` looks
        plan = build_plan(model.layout, hf_layout(hf_config, head="score"))
        hf.export_hf(plan, rank, model.tensors, path, Path(folder) / f"gradients-{case}")
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, dict[str, torch.Tensor]]:
    """(folder with the answers of the grids, scores, gradients)."""
    root = tmp_path_factory.mktemp("scores")
    model = hf_classifier("qwen3-tied")
    model.save_pretrained(root / "model")
    tokens, lengths, weights = flat()
    scores = torch.cat(
        [model.score(model.model(part[None]).last_hidden_state)[0, :, 0] for part in tokens.split(lengths.tolist())]
    )
    (scores * weights).sum().backward()
    return root, scores.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def answers(expected: Any) -> list[dict[str, torch.Tensor]]:
    return run_grid(2, on_grids, str(expected[0]))


@pytest.mark.parametrize("case", IDS)
def test_scores_of_unequal_sequences(expected: Any, answers: Any, case: str) -> None:
    for answer in answers:
        assert float((answer[case] - expected[1]).abs().max() / expected[1].abs().max()) < TOLERANCE


@pytest.mark.parametrize("case", IDS)
def test_gradients_of_unequal_sequences(expected: Any, answers: Any, case: str) -> None:
    from safetensors.torch import load_file

    found = load_file(expected[0] / f"gradients-{case}" / "model.safetensors")
    assert found.keys() == expected[2].keys()
    for name, want in expected[2].items():
        error = float((found[name] - want).abs().max() / want.abs().max())
        assert error < TOLERANCE, f"{name}: gradient off by {error:.1e} of its largest entry"
