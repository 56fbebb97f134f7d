"""Divergence from a teacher's distribution, against its definition with plain softmax of whole logits in float64."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.ops.divergence import (
    BUFFERS,
    LEAST_TAIL,
    Divergence,
    TopK,
    WholeVocabulary,
    linear_divergence,
    linear_divergence_reference,
    linear_top_k,
)

ROWS, COLUMNS, IDS = 7, 24, 21
"""Rows, columns of the heads, and ids that both models have."""
KINDS = [Divergence("forward_kl"), Divergence("reverse_kl"), *(Divergence("jsd", beta) for beta in (0.1, 0.5, 0.8))]
TEMPERATURE = 0.7


def defined(p: torch.Tensor, q: torch.Tensor, divergence: Divergence) -> torch.Tensor:
    """The formula's sums of probabilities [T, n]."""
    if divergence.kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if divergence.kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    beta = divergence.beta
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def softmax(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((hidden @ weight.t())[:, :IDS] / TEMPERATURE).softmax(-1)


def with_tail(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of ``ids`` and of all others together."""
    rest = [[j for j in range(IDS) if j not in row] for row in ids.tolist()]
    tail = torch.stack([x[i, others].sum() for i, others in enumerate(rest)])
    return torch.cat([x.gather(1, ids), tail[:, None]], -1)


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states and head of the student, then of the teacher, whose hidden size differs."""
    g = torch.Generator().manual_seed(seed)
    sizes = ((ROWS, 5), (COLUMNS, 5), (ROWS, 8), (COLUMNS, 8))
    return tuple(torch.randn(*size, generator=g, dtype=torch.float64).to(dtype) for size in sizes)


def with_gradients(function: Any, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(values, gradients of both inputs) for a loss that weighs rows differently, one of them by 0."""
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    values = function(*inputs)
    upstream = torch.arange(ROWS, dtype=values.dtype) - 2.0
    return values.detach(), *torch.autograd.grad(values @ upstream, inputs)


@pytest.mark.parametrize("top_k", [0, 1, 4, IDS])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
def test_against_the_definition(divergence: Divergence, top_k: int) -> None:
    hidden, weight, taught, head = make()
    p = softmax(taught, head)
    ids = p.topk(top_k or 1).indices
    teacher: Any = TopK(ids, p.gather(1, ids).log(), IDS) if top_k else WholeVocabulary(taught, head)

    def definition(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = softmax(h, w)
        tail = 0 < top_k < IDS
        return defined(with_tail(p, ids), with_tail(q, ids), divergence) if tail else defined(p, q, divergence)

    wanted = with_gradients(definition, hidden, weight)
    settings: dict[str, Any] = {"vocab_size": IDS, "temperature": TEMPERATURE}
    three_rows = 3 * BUFFERS * IDS * 8
    for budget, of in itertools.product((None, three_rows, 1), (linear_divergence, linear_divergence_reference)):
        found = with_gradients(
            lambda h, w: of(h, w, teacher, divergence, logits_bytes=budget, **settings),  # noqa: B023
            hidden,
            weight,
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    single = [x.float() for x in (hidden, weight, taught, head)]
    ours: Any = TopK(ids, teacher.logp.float(), IDS) if top_k else WholeVocabulary(single[2], single[3])
    found = with_gradients(lambda h, w: linear_divergence(h, w, ours, divergence, **settings), *single[:2])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
def test_bounded_logits(divergence: Divergence) -> None:
    """Of student and teacher, each by its own bound; values are those of the bounded distributions."""
    hidden, weight, taught, head = make(3)
    teacher = WholeVocabulary(taught, head, softcap=2.0)
    settings: dict[str, Any] = {"vocab_size": IDS, "temperature": TEMPERATURE, "softcap": 1.5}

    def bounded(hidden: torch.Tensor, weight: torch.Tensor, softcap: float) -> torch.Tensor:
        logits = softcap * torch.tanh((hidden @ weight.t())[:, :IDS] / softcap)
        return (logits / TEMPERATURE).softmax(-1)

    wanted = with_gradients(
        lambda h, w: defined(bounded(taught, head, 2.0), bounded(h, w, 1.5), divergence), hidden, weight
    )
    for of in (linear_divergence, linear_divergence_reference):
        found = with_gradients(lambda h, w: of(h, w, teacher, divergence, **settings), hidden, weight)  # noqa: B023
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    _, logp = linear_top_k(hidden, weight, 3, **settings)
    torch.testing.assert_close(logp, bounded(hidden, weight, 1.5).log().topk(3).values, rtol=1e-9, atol=1e-11)


def by_trls_beta(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence that TRL's ``GKDTrainer`` documents for its ``beta``, by torch.distributions. TRL itself is not
    installed."""
    teacher, student, mixture = (Categorical(probs=x) for x in (p, q, beta * p + (1 - beta) * q))
    if beta in (0.0, 1.0):
        return kl_divergence(teacher, student) if beta == 0.0 else kl_divergence(student, teacher)
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def test_the_same_as_by_trls_beta() -> None:
    hidden, weight, taught, head = make(1)
    teacher = WholeVocabulary(taught, head)
    cases = [(KINDS[0], 0.0), (KINDS[1], 1.0), *((d, d.beta) for d in KINDS[2:])]
    for divergence, beta in cases:
        found = linear_divergence(hidden, weight, teacher, divergence, vocab_size=IDS, temperature=TEMPERATURE)
        wanted = by_trls_beta(softmax(taught, head), softmax(hidden, weight), beta)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_limits_of_jsd() -> None:
    """JSD / β goes to the forward KL, JSD / (1 − β) to the reverse KL."""
    hidden, weight, taught, head = make(2)
    few, many = (
        linear_divergence(hidden, weight, WholeVocabulary(taught, head), Divergence("jsd", beta), vocab_size=IDS)
        for beta in (1e-6, 1 - 1e-6)
    )
    forward, reverse = (
        linear_divergence(hidden, weight, WholeVocabulary(taught, head), kind, vocab_size=IDS) for kind in KINDS[:2]
    )
    torch.testing.assert_close(few / 1e-6, forward, rtol=1e-3, atol=0)
    torch.testing.assert_close(many / 1e-6, reverse, rtol=1e-3, atol=0)
    for beta in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=r"beta must be above 0 and below 1.* take forward_kl"):
            Divergence("jsd", beta)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
def test_a_teacher_equal_to_the_student_teaches_nothing(divergence: Divergence) -> None:
    hidden, weight, *_ = make(3)
    ids, logp = linear_top_k(hidden, weight, 4, vocab_size=IDS)
    for teacher in (WholeVocabulary(hidden, weight), TopK(ids, logp, IDS)):
        found = with_gradients(
            lambda h, w: linear_divergence(h, w, teacher, divergence, vocab_size=IDS),  # noqa: B023
            hidden,
            weight,
        )
        assert all(x.abs().max() < 1e-12 for x in found)


def test_the_likeliest_tokens() -> None:
    hidden, weight, *_ = make(4)
    p = softmax(hidden, weight)
    for k, budget in itertools.product((1, 5, IDS), (None, 1)):
        settings: dict[str, Any] = {"vocab_size": IDS, "temperature": TEMPERATURE, "logits_bytes": budget}
        ids, logp = linear_top_k(hidden, weight, k, **settings)
        assert torch.equal(ids, p.topk(k).indices)
        torch.testing.assert_close(logp, p.topk(k).values.log(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="k must be from 1 to vocab_size=21, got 22"):
        linear_top_k(hidden, weight, IDS + 1, vocab_size=IDS)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
def test_distributions_without_overlap_stay_finite(divergence: Divergence) -> None:
    """Logits far apart in bfloat16, and a teacher whose tail has no mass in float32."""
    weight = torch.eye(4, dtype=torch.bfloat16)
    hidden, taught = torch.tensor([[300.0, 0, 0, 0]] * 2), torch.tensor([[0, 0, 300.0, 0]] * 2)
    ids = torch.tensor([[2, 1]] * 2)
    tail = TopK(ids, torch.tensor([[0.0, -300.0]] * 2), 4)
    for teacher in (WholeVocabulary(taught.bfloat16(), weight), tail):
        h = hidden.bfloat16().requires_grad_()
        found = linear_divergence(h, weight, teacher, divergence, vocab_size=4)
        (gradient,) = torch.autograd.grad(found.sum(), h)
        assert found.isfinite().all() and gradient.isfinite().all() and found.min() > 0.1
    reverse = linear_divergence(hidden.bfloat16(), weight, tail, Divergence("reverse_kl"), vocab_size=4)
    assert reverse[0] == pytest.approx(-torch.tensor(LEAST_TAIL).log().item(), rel=1e-3)


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at one time, without those ``given``."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self._seen:
                self._seen.add(key)
                size = x.untyped_storage().nbytes()
                self.now += size
                weakref.finalize(x.untyped_storage(), self._gone, key, size)
        self.most = max(self.most, self.now)
        return found

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(("divergence", "top_k"), [(KINDS[0], 0), (KINDS[3], 0), (KINDS[3], 64)])
def test_memory_is_bounded_by_the_budget(divergence: Divergence, top_k: int) -> None:
    """8,192 tokens with a vocabulary of 151,936 would be 5 GB of logits for each model."""
    rows, columns, budget = 8192, 151936, 2**30
    with FakeTensorMode():
        hidden, weight = torch.empty(rows, 64, requires_grad=True), torch.empty(columns, 64, requires_grad=True)
        teacher: Any = WholeVocabulary(torch.empty(rows, 128), torch.empty(columns, 128))
        if top_k:
            teacher = TopK(torch.zeros(rows, top_k, dtype=torch.int64), torch.empty(rows, top_k), columns)
        given = [x for x in (hidden, weight, *vars(teacher).values()) if isinstance(x, torch.Tensor)]
        with Peak(*given) as peak:
            values = linear_divergence(hidden, weight, teacher, divergence, vocab_size=columns, logits_bytes=budget)
            gradients = torch.autograd.grad(values.sum(), [hidden, weight])
    gradient_bytes = sum(x.nbytes for x in gradients)
    per_row = rows * (top_k + 8) * 8
    assert budget / 6 < peak.most - gradient_bytes < budget + per_row, (peak.most, gradient_bytes)
