"""Error of merging an adapter in bfloat16 throughout, and in float32 rounded once, as ``megarl convert`` does.

    python benchmarks/adapter_merge.py

One weight of 4096 x 4096 with normal elements of deviation 0.02 and an adapter of rank 32, both in bfloat16. Errors are
those of the merged weight against the sum in float64, relative to the update s B A: the largest error by the largest
element of the update, the mean error by the mean element. Then what is left of a weight that is merged and unmerged in
bfloat16 a hundred times. The numbers are in docs/benchmarks/adapter_merge.md.
"""

from __future__ import annotations

import argparse
import sys

import page
import torch

SIZE, RANK, DEVIATION = 4096, 32, 0.02
UPDATES = (0.1, 0.01, 0.001)
"""Root mean square of the update, relative to the weight's."""


CYCLES = 100


def rows() -> list[str]:
    """Lines of the table, one for each size of the update and way of merging."""
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(SIZE, SIZE, generator=generator) * DEVIATION).bfloat16()
    a = (torch.randn(RANK, SIZE, generator=generator) / SIZE**0.5).bfloat16()
    lines = []
    for size in UPDATES:
        scale = 2.0
        b = torch.randn(SIZE, RANK, generator=generator) * size * DEVIATION * (SIZE / RANK) ** 0.5 / scale
        b = b.bfloat16()
        update = scale * (b.double() @ a.double())
        exact = w.double() + update
        in_float32 = w.float() + scale * (b.float() @ a.float())
        ways = {
            "float32, not rounded": in_float32,
            "float32, rounded once": in_float32.bfloat16(),
            "bfloat16": w + scale * (b @ a),
        }
        for way, merged in ways.items():
            errors = (merged.double() - exact).abs()
            differ = float((merged != ways["float32, rounded once"]).double().mean())
            shown = f"{differ:.1%}" if way == "bfloat16" else ""
            of_update = [f"{errors.max() / update.abs().max():.1e}", f"{errors.mean() / update.abs().mean():.1e}"]
            of_weight = f"{errors.mean() / w.double().abs().mean():.1e}"
            lines.append(f"| {' | '.join([f'{size:g}', way, *of_update, of_weight, shown])} |")
    return lines


def drift(size: float) -> str:
    """Line of a weight that was merged and unmerged in place, each time with another adapter, as trainers do that have
    no second copy."""
    generator, width = torch.Generator().manual_seed(1), SIZE // 4
    w = (torch.randn(width, width, generator=generator) * DEVIATION).bfloat16()
    before, largest = w.clone(), 0.0
    for _ in range(CYCLES):
        a = (torch.randn(RANK, width, generator=generator) / width**0.5).bfloat16()
        b = (torch.randn(width, RANK, generator=generator) * size * DEVIATION * (width / RANK) ** 0.5).bfloat16()
        update = b @ a
        w += update
        w -= update
        largest = max(largest, float(update.abs().double().mean()))
    error = float((w.double() - before.double()).abs().mean())
    return f"| {size:g} | {float((w != before).double().mean()):.0%} | {error / largest:.1e} |"


def main() -> None:
    """Measure, print the tables and put them into docs/benchmarks/adapter_merge.md."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = [
        "| update / weight | merged in | largest error / update | mean error / update | mean error / weight | differ |",
        "|---|---|---|---|---|---|",
        *rows(),
        "",
        f"A bfloat16 weight after {CYCLES} merges and unmerges in place, each of another adapter:",
        "",
        "| update / weight | elements that differ | mean difference / update |",
        "|---|---|---|",
        *map(drift, UPDATES),
    ]
    text = "\n".join(lines) + "\n"
    page.write("benchmarks/adapter_merge.md", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
