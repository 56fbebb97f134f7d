"""Every kernel on buffers of exact size, under AddressSanitizer and UndefinedBehaviorSanitizer.

``python tests/native/sanitized.py`` builds, starts itself again in an environment that has the sanitizers, and prints
``clean``. Covers the C++ twins and the CUDA kernels' code, which runs emulated (tests/native/cuda_runtime.h).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "MEGARL_SANITIZED"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.native import build

    if MARK not in os.environ:
        build.build(emulated=True, sanitize=True)
        environment = {**build.sanitizer_environment(), MARK: "1"}
        return subprocess.run([sys.executable, __file__], env=environment, cwd=ROOT).returncode
    _run_all()
    print("clean")
    return 0


def _run_all() -> None:
    import torch

    from megarl.ops import native
    from tests.native import build

    native.library = build.extension(emulated=True, sanitize=True)
    on_cpu = native.run

    def emulated(name: str, _: torch.Tensor, *arguments: object) -> None:
        getattr(native.library.cuda, name)(*arguments, 0)

    torch.set_num_threads(2)
    for native.run in (on_cpu, emulated):
        for case in (_logprob, _advantage, _policy, _digest, _odd_rows_and_boxes):
            case()


def _odd_rows_and_boxes() -> None:
    import torch

    from tests.native import kernels

    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        for width in (1, 13, 2049, 33_001):
            case = kernels.make_case(i, 5, width, 1, dtype=dtype)
            kernels.close_to_float64(case, "cpu")
            kernels.misaligned_and_strided_rows_change_no_bits(case, 1 + i, 3, "cpu")
        kernels.special_rows(dtype, 2500, "cpu")
    for seed in range(40):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
            kernels.digest_equals_reference(*kernels.a_box(seed, 1 + seed % 8, dtype), "cpu")


def _logprob() -> None:
    import torch

    from megarl import ops

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, columns, vocab in ((1, 1, 1), (3, 17, 15), (5, 1024, 1024), (2, 3001, 2999), (0, 8, 8)):
            leaf = torch.randn(rows, columns).to(dtype).requires_grad_()
            targets = torch.randint(0, vocab, (rows,))
            targets[rows // 2 : rows // 2 + 1] = -100
            logp, entropy = ops.vocab_parallel_logprob(leaf * 1, targets, vocab_size=vocab, temperature=0.7)
            (logp.sum() + entropy.sum()).backward()
        # A shard whose columns are padding only, rows that begin at odd addresses, rows far apart.
        store = torch.randn(4 * 37 + 3).to(dtype)
        rows_apart = store[3:].view(4, 37)[:, :33]
        stats = torch.ops.megarl.logprob_local(rows_apart, torch.tensor([0, 5, 70, -100]), 40, 71, 1.0)
        assert stats.isfinite().all()
        assert torch.ops.megarl.logprob_local(rows_apart, torch.tensor([0, 5, 39, -100]), 40, 40, 1.0).shape == (4, 4)


def _advantage() -> None:
    import torch

    from megarl import ops

    for lengths in ([], [0], [1], [3, 0, 5], [4097, 1, 8192], [70_000]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        tokens, sequences = int(cu[-1]), len(lengths)
        ops.gae(torch.randn(tokens), torch.randn(tokens), cu, gamma=0.99, lam=0.95, bootstrap=torch.randn(sequences))


def _policy() -> None:
    import torch

    from megarl import ops

    for lengths in ([], [0, 2], [1], [33, 0, 257], [5000]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        tokens = int(cu[-1])
        new, old, ref, advantages, entropy, weight = torch.randn(6, tokens).unbind()
        for importance in ("token", "sequence_mean", "sequence_product"):
            ops.policy_loss(
                new.requires_grad_(), old, advantages, cu, clip_low=0.2, clip_high=0.2, importance=importance
            ).total.backward()
        ops.policy_loss(
            new,
            old,
            advantages,
            cu,
            mask=torch.rand(tokens) < 0.5,
            entropy=entropy.requires_grad_(),
            ref_logp=ref,
            is_weight=weight,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=3.0,
            kl="k3",
            kl_coef=0.1,
            entropy_coef=0.1,
            aggregation="seq_mean",
        ).total.backward()


def _digest() -> None:
    import torch

    from megarl import ops

    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((1,), (3, 5), (7, 129), (2, 3, 257), (70_001,)):
            x = torch.randn(shape).to(dtype)
            ops.slice_digest(x, start=(0,) * x.dim(), shape=shape)
            ops.slice_digest(x.transpose(0, -1).contiguous().transpose(0, -1), start=(0,) * x.dim(), shape=shape)
            if x.dim() > 1:
                ops.slice_digest(x[1:, ..., 1:], start=(1, *[0] * (x.dim() - 2), 1), shape=shape)


if __name__ == "__main__":
    raise SystemExit(main())
