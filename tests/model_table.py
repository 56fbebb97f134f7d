"""The table of model families in docs/models.md, measured.

    python -m tests.model_table [MODEL_TYPE…]    # these families again, the others' rows stay

Each family's tiny model is computed on grids of trainer ranks and in an engine, and compared with transformers.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from megarl.config.schema import ModelConfig
from megarl.run.supervise.process_specs import engine_process
from megarl.weights.architectures import ARCHITECTURES
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import HOST, KEY
from tests.loop.test_sync_families import BF16_CELLS, CELLS, MORE_CELLS, Cell, engine_of, gap
from tests.loop.zygote import Zygote
from tests.parallel.families import FAMILIES, MOE, VOCAB, hf_model
from tests.parallel.grid import run_grid
from tests.parallel.test_families import ALL_GRIDS, on_grids

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- table: begin, written by python -m tests.model_table -->", "<!-- table: end -->"
DENSE_GRIDS, EXPERT_GRIDS = ("tp2-sp", "pp2", "tp2pp2"), ("tp2-sp", "pp2", "tp2pp2ep2")


def first_of(model_type: str) -> str:
    """Return the first tiny model of a family."""
    return next(name for name, (kind, _) in FAMILIES.items() if kind == model_type)


def trainer_difference(folder: Path, family: str) -> float:
    """Largest difference of a logit from transformers', of any grid."""
    model = hf_model(family)
    model.save_pretrained(folder / family)
    tokens = torch.randint(2, VOCAB, (8, 24), generator=torch.Generator().manual_seed(3))
    torch.save({"tokens": tokens, "logits": model(tokens).logits.detach()}, folder / family / "logits.pt")
    found = []
    for grid in EXPERT_GRIDS if family in MOE else DENSE_GRIDS:
        answers = run_grid(ALL_GRIDS[grid].world_size, on_grids, str(folder), [(family, grid)])
        found += [value for answer in answers for value in answer.values() if value is not None]
    return max(found)


def engine_difference(folder: Path, cell: Cell, zygote: Zygote) -> str:
    """Largest difference of a sampled token's log-prob from transformers', after a weight sync; in bfloat16 the mean
    one."""
    with engine_of(cell, folder, zygote) as (engine, ranks, model):
        ranks.publish_whole(model)
        found = gap(engine, model)
        return f"{found.max():.1e}" if cell.dtype == "float32" else f"{found.mean():.1e} (bfloat16, mean)"


def rows(kept: Mapping[str, str]) -> list[str]:
    """Lines of the table.

    Args:
        kept: ``model_type`` -> line, of families that are not measured.
    """
    lines = [
        "| `model_type` | models | trainer: largest difference of a logit | engine: of a log-prob | critic |",
        "|---|---|---|---|---|",
    ]
    cells = {
        FAMILIES[cell.family][0]: cell for cell in reversed((*CELLS, *MORE_CELLS, *BF16_CELLS)) if not cell.changes
    }
    _, environment = engine_process("", TINY_ROLLOUT, ModelConfig(), HOST, 0)
    zygote = Zygote({**environment, "MEGARL_JOB_KEY": KEY})
    try:
        for name, table in ARCHITECTURES.items():
            if name in kept:
                lines.append(kept[name])
                continue
            folder = Path(tempfile.mkdtemp(prefix="megarl-models-"))
            trainer = trainer_difference(folder, first_of(name))
            engine = engine_difference(folder / "engine", cells[name], zygote)
            shutil.rmtree(folder)
            critic = "yes" if table.has_score_class else "no"
            lines.append(f"| {name} | {table.models} | {trainer:.1e} | {engine} | {critic} |")
            print(lines[-1], flush=True)
    finally:
        zygote.stop()
    return lines


def main() -> None:
    _, _, before = PAGE.read_text().partition(BEGIN)
    again = sys.argv[1:] or list(ARCHITECTURES)
    found = {line.split()[1]: line for line in before.partition(END)[0].splitlines() if line.startswith("| ")}
    lines = rows({name: line for name, line in found.items() if name not in again})
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text("\n".join([head + BEGIN, *lines, END]) + tail)


if __name__ == "__main__":
    main()
