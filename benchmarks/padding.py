"""Padding of micro-batches whose length is that of the fullest, and of those that all have
``trainer.max_tokens_per_micro_batch``: ``python benchmarks/padding.py``, which writes docs/benchmarks/padding.md.

The second is what Megatron-Core's overlap of tensor parallelism's communication would need. Counted, not timed: lengths
are drawn, and dealt to micro-batches as the trainer deals them.
"""

from __future__ import annotations

import page
from packing import lengths_of

from megarl.learn.batching.micro import MicroBatching, deal

MEDIAN, LONGEST, DRAWS = 3000, 32768, 20
BUDGETS, RESPONSES, RANKS = (32768, 65536), (512, 128), (1, 4, 16)


def shares(number: int, budget: int, dp: int) -> tuple[float, float]:
    """Padding of all positions, with the length of an update's fullest micro-batch and with ``budget`` tokens."""
    tokens = fullest_each = fixed = 0
    for seed in range(DRAWS):
        lengths = lengths_of(number, MEDIAN, LONGEST, seed)
        ranks = deal([[n] for n in lengths], MicroBatching(dp=dp, max_tokens=budget))
        sums = [sum(lengths[i] for i in chunk) for chunks in ranks for chunk in chunks]
        tokens += sum(lengths)
        fullest_each += len(sums) * max(sums)
        fixed += len(sums) * budget
    return 1 - tokens / fullest_each, 1 - tokens / fixed


def main() -> None:
    lines = [
        f"Lengths are log-normal with a median of {MEDIAN:,} tokens, cut at {LONGEST:,}. Shares are padding of all "
        f"positions, now and with one fixed length, over {DRAWS} draws:",
        "",
        "| `max_tokens_per_micro_batch` | responses of an update | " + " | ".join(f"`dp` {dp}" for dp in RANKS) + " |",
        "|---|---|" + "---|" * len(RANKS),
    ]
    for budget in BUDGETS:
        for number in RESPONSES:
            cells = ("{:.1%}, {:.1%}".format(*shares(number, budget, dp)) for dp in RANKS)
            lines.append(f"| {budget:,} | {number} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    print(text)
    page.write("benchmarks/padding.md", text)


if __name__ == "__main__":
    main()
