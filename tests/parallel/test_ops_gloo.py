"""Vocabulary-parallel log-prob over a real group: one collective, the same numbers on every rank."""

from __future__ import annotations

import torch

from megarl import ops
from tests.parallel.grid import run_grid

VOCAB, WIDTH, ROWS = 37, 20, 9  # two shards of 20 columns: three of them padding
TEMPERATURE = 0.8


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, 2 * WIDTH, generator=g) * 4
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    targets[2] = -100
    return logits, targets, torch.randn(ROWS, generator=g), torch.randn(ROWS, generator=g)


def _on_rank(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.distributed.init_process_group("gloo")
    logits, targets, g_logp, g_entropy = _inputs()
    found = {}
    for name, op in (("op", ops.vocab_parallel_logprob), ("reference", ops.vocab_parallel_logprob_reference)):
        leaf = logits[:, rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
        logp, entropy = op(
            leaf * 1,
            targets,
            group=torch.distributed.group.WORLD,
            vocab_start=rank * WIDTH,
            vocab_size=VOCAB,
            temperature=TEMPERATURE,
        )
        (logp * g_logp + entropy * g_entropy).sum().backward()
        found[name] = (logp.detach(), entropy.detach(), leaf.grad)
    return found


def test_two_ranks_agree_with_each_other_and_with_float64():
    ranks = run_grid(2, _on_rank)
    logits, targets, g_logp, g_entropy = _inputs()
    whole = logits.double().requires_grad_()
    logp, entropy = ops.vocab_parallel_logprob_reference(whole, targets, vocab_size=VOCAB, temperature=TEMPERATURE)
    (logp * g_logp + entropy * g_entropy).sum().backward()
    roundings = 8 * torch.finfo(torch.float32).eps * float(logits.abs().max()) / TEMPERATURE
    for i in range(2):
        assert torch.equal(ranks[0]["op"][i], ranks[1]["op"][i])
    for name in ("op", "reference"):
        assert (ranks[0][name][0] - logp).abs().max() < roundings
        assert (ranks[0][name][1] - entropy).abs().max() < roundings
        gradient = torch.cat([r[name][2] for r in ranks], dim=1)
        assert (gradient - whole.grad).abs().max() < roundings
        assert (gradient[:, VOCAB:] == 0).all() and (gradient[2] == 0).all()


def _unequal(rank: int) -> str:
    torch.distributed.init_process_group("gloo")
    logits = torch.randn(ROWS, WIDTH - 3 * rank)
    group = torch.distributed.group.WORLD
    try:
        ops.vocab_parallel_logprob(
            logits, torch.zeros(ROWS, dtype=torch.int64), group=group, vocab_start=rank * WIDTH, vocab_size=VOCAB
        )
    except ValueError as error:
        return str(error)
    return ""


def test_unequal_shards_are_refused_on_every_rank() -> None:
    """Not only on the one whose own numbers are wrong: the other would wait for it."""
    first, second = run_grid(2, _unequal)
    assert first == second and "rank 0 has 20 columns from 0 on, rank 1 has 17 columns from 20 on" in first
