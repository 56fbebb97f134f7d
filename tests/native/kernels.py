"""What the CUDA kernels must do, checked on any device: under the emulator on CPU tensors, or on a GPU.

Each check takes ``device`` and raises AssertionError; the truth is the float64 reference, the twin the CPU kernels.
"""

from __future__ import annotations

import contextlib

import torch

from megarl import ops
from megarl.ops import logprob
from tests.unit.test_ops_logprob import Case, assert_close, by_shards, make_case, truth

DIGESTED = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
Results = tuple[torch.Tensor, ...]


def on(case: Case, device: str) -> Case:
    return Case(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in case))


def close_to_float64(case: Case, device: str) -> None:
    got = [x.cpu() for x in by_shards(on(case, device))]
    assert_close(case, got, truth(case))


def same_bits_alone_and_again(case: Case, row: int, device: str) -> None:
    """A row among others, alone (elsewhere in memory), and among others a second time."""
    case = on(case, device)
    together, again = by_shards(case), by_shards(case)
    only = slice(row, row + 1)
    alone = by_shards(
        case._replace(
            logits=case.logits[only].clone(),
            targets=case.targets[only],
            grad_logp=case.grad_logp[only],
            grad_entropy=case.grad_entropy[only],
        )  # fmt: skip
    )
    for x, y, one in zip(together, again, alone, strict=True):
        assert torch.equal(x, y) and torch.equal(x[row], one[0])


def misaligned_and_strided_rows_change_no_bits(case: Case, shift: int, gap: int, device: str) -> None:
    """Rows that begin anywhere, in place and beside, against the same rows packed; what lies around them stays."""
    case = on(case._replace(shards=1), device)
    rows, cols = case.logits.shape
    buffer = torch.full((rows * (cols + gap) + shift,), 7.0, dtype=case.logits.dtype, device=device)
    view = buffer[shift:].view(rows, cols + gap)[:, :cols]
    view.copy_(case.logits)
    packed = by_shards(case)
    assert all(torch.equal(a, b) for a, b in zip(by_shards(case._replace(logits=view)), packed, strict=True))
    stats = logprob.local_stats(view, case.targets, 0, case.vocab_size, case.temperature)
    _, entropy, norm = logprob.combine_stats(stats[None], case.targets, case.temperature)
    logprob.gradient_(
        view, case.targets, norm, entropy, case.grad_logp, case.grad_entropy, 0, case.vocab_size, case.temperature
    )
    assert torch.equal(view, packed[2])
    view.fill_(7.0)
    assert (buffer == 7.0).all()


def special_rows(dtype: torch.dtype, vocab_size: int, device: str) -> None:
    """-inf logits, NaN, ignored rows, targets that do not exist, missing gradients, padding."""
    padded = vocab_size + 5
    logits = torch.randn(8, padded, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[:, vocab_size:] = torch.nan  # padding is never looked at
    targets = torch.tensor([1, -100, vocab_size, -7, 2, 1, 0, vocab_size - 1])
    logits[0, ::2] = -torch.inf
    logits[4, 1] = torch.nan
    logits[5, :vocab_size] = -torch.inf
    logits[6, 0] = torch.inf
    logits[7, : vocab_size - 1] = -torch.inf  # certain
    g = torch.ones(8)
    logits, targets, g = (x.to(device) for x in (logits, targets, g))
    stats = logprob.local_stats(logits, targets, 0, vocab_size, 1.0)
    logp, entropy, norm = (x.cpu() for x in logprob.combine_stats(stats[None], targets, 1.0))
    assert logp.isnan().tolist() == [False, False, True, True, True, True, True, False]
    assert entropy.isnan().tolist() == logp.isnan().tolist()
    assert logp[1] == entropy[1] == 0 and logp[7] == entropy[7] == 0
    exact = ops.vocab_parallel_logprob_reference(
        logits[:1, :vocab_size].cpu().double(), targets[:1].cpu(), vocab_size=vocab_size
    )
    assert abs(logp[0] - exact[0][0]) < 2e-6 and abs(entropy[0] - exact[1][0]) < 2e-6
    norm, entropy = norm.to(device), entropy.to(device)
    grad = logprob.gradient(logits, targets, norm, entropy, g, g, 0, vocab_size, 1.0).cpu()
    assert (grad[:, vocab_size:] == 0).all() and (grad[1] == 0).all() and (grad[0, :vocab_size:2] == 0).all()
    assert grad[0].isfinite().all() and (grad[7] == 0).all() and grad[4, :vocab_size].isnan().all()
    for missing in ((None, g), (g, None), (None, None)):
        zeros = [torch.zeros_like(g) if x is None else x for x in missing]
        a, b = (logprob.gradient(logits, targets, norm, entropy, *x, 0, vocab_size, 1.0) for x in (missing, zeros))
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def many_rows(device: str) -> None:
    """More rows than a grid has in y."""
    logits = torch.randn(70_001, 3, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(70_001) % 3
    case = Case(logits, targets, 3, 1, 1.0, torch.ones(70_001), torch.ones(70_001))
    close_to_float64(case, device)


def a_long_row(device: str) -> None:
    case = make_case(9, rows=2, vocab_size=1_000_003, shards=1, scale=1.0)
    close_to_float64(case, device)


def digest_equals_reference(x: torch.Tensor, start: list[int], shape: list[int], device: str) -> None:
    moved = x.to(device) if x.device.type != device else x  # keeps strides
    assert ops.slice_digest(moved, start=start, shape=shape) == ops.slice_digest_reference(x, start=start, shape=shape)


def lines_equal_reference(width: int, rows: int, shift: int, gap: int, dtype: torch.dtype, device: str) -> None:
    """Rows of ``width`` elements, ``gap`` apart in memory, that begin ``shift`` elements into theirs, in one matrix and
    in a stack of two."""
    g = torch.Generator().manual_seed(width)
    shape = (2, rows, shift + width + gap)
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)[..., 0]
    x = whole.contiguous()[:, :, shift : shift + width]
    for start in ((0, 0, shift), (0, 0, shift + 1)):  # beside the words of memory in the second
        logical = (2, rows + 1, shift + width + gap + 1)
        digest_equals_reference(x[:1], list(start), list(logical), device)
        digest_equals_reference(x, list(start), list(logical), device)


def many_digests_equal_reference(seed: int, count: int, device: str) -> None:
    """Boxes of all element sizes in one call, empty ones among them."""
    g = torch.Generator().manual_seed(seed)
    boxes = []
    for i in range(count):
        kind, dims, empty = (int(torch.randint(0, n, (), generator=g)) for n in (4, 8, 6))
        x, start, shape = a_box(seed + i, 1 + dims, DIGESTED[kind])
        boxes.append((x[:0] if empty == 0 else x, start, shape))
    want = [ops.slice_digest_reference(x, start=start, shape=shape) for x, start, shape in boxes]
    got = ops.slice_digests([(x.to(device), start, shape) for x, start, shape in boxes])
    assert got.device.type == device and ops.digest_values(got) == want


def a_box(seed: int, dims: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int], list[int]]:
    """A random box: permuted, sliced, expanded, from a flat index up to 2**40."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (), generator=g))

    limit = (0, 5000, 90, 20, 9, 5, 4, 3, 3)[dims]
    sizes = [1 + draw(limit) for _ in range(dims)]
    x = torch.randint(0, 256, (*sizes, dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)[..., 0]
    if draw(2):
        x = x.contiguous()
    if draw(2):
        x = x.permute(torch.randperm(dims, generator=g).tolist())
    for d in range(dims):
        if x.shape[d] > 2 and draw(2):
            low = draw(x.shape[d] - 1)
            x = x.narrow(d, low, 1 + draw(x.shape[d] - low))
        if draw(6) == 0:
            x = x.narrow(d, 0, 1).expand([3 if i == d else n for i, n in enumerate(x.shape)])
    start = [draw(7) * draw(2) for _ in range(dims)]
    if draw(3) == 0:
        start[0] += 2**32
    shape = [lo + n + draw(4) * draw(2) for lo, n in zip(start, x.shape, strict=True)]
    return x, start, shape


@contextlib.contextmanager
def peak_memory_below(extra: int):
    """On a GPU: no more than ``extra`` bytes beyond what is allocated already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= extra, f"{used} bytes at the peak, {extra} allowed"
