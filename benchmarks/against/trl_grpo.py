"""TRL's GRPOTrainer on rows of megarl: what `peers.py` starts, in TRL's own environment.

    python trl_grpo.py SPEC.json

SPEC has ``model``, ``train``, ``eval``, ``marks``, ``steps``, ``updates``, ``interval``, ``threads``, ``settings``.
A mark is a line of ``marks``: its kind, the wall clock and what is known of it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

EVALUATION_ROWS = 500
"""Rows of a batch of an evaluation. All at once is fastest here."""


def score(text: str, truth: str) -> float:
    """The reward of ``reasoning_gym/chain_sum``, as megarl computes it: 1 for the number, less for a text around it."""
    found = re.findall(r"<answer>\s?(.*?)\s?</answer>", text, re.DOTALL)
    answer = (found[-1] if found else text).strip().replace(",", "")
    truth = truth.replace(",", "")
    if not answer:
        return 0.0
    try:
        if Decimal(answer) == Decimal(truth):
            return 1.0
    except InvalidOperation:
        pass
    return len(truth) / len(answer) if truth in answer else 0.0


def read(path: str) -> list[dict[str, Any]]:
    """Rows with the two columns that matter here."""
    import pyarrow.parquet

    return [
        {"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]}
        for row in pyarrow.parquet.read_table(path, columns=["prompt", "reward_model"]).to_pylist()
    ]


class Marks:
    """Moments of a run, in a file."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115

    def add(self, kind: str, **known: float) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **known}) + "\n")


def held_out(model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_tokens: int) -> float:
    """Share of rows whose greedy answer is right. The model is left in the mode that it was in."""
    import torch

    training = model.training
    model.eval()
    right = 0
    for at in range(0, len(rows), EVALUATION_ROWS):
        some = rows[at : at + EVALUATION_ROWS]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in some],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            found = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(score(text, row["truth"]) >= 1.0 for text, row in zip(texts, some, strict=True))
    model.train(training)
    return right / len(rows)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    marks = Marks(spec["marks"])

    import torch

    torch.set_num_threads(spec["threads"])

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows = read(spec["eval"])
    settings = GRPOConfig(**spec["settings"])

    def reward(completions: list[Any], completion_ids: list[Any], truth: list[str], **_: Any) -> list[float]:
        marks.add("rollout", tokens=sum(len(ids) for ids in completion_ids))
        return [score(found[0]["content"], right) for found, right in zip(completions, truth, strict=True)]

    class Marking(TrainerCallback):
        """Marks the steps and evaluates between them."""

        def evaluate(self, step: int, model: Any) -> None:
            start = time.time()
            accuracy = held_out(model, tokenizer, rows, settings.max_completion_length)
            marks.add("evaluation", step=step, accuracy=accuracy, seconds=time.time() - start)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            marks.add("ready")
            self.evaluate(0, model)
            marks.add("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            step, rest = divmod(state.global_step, spec["updates"])
            if rest:
                return
            marks.add("step", step=step)
            if step == spec["steps"] or (spec["interval"] and step % spec["interval"] == 0):
                self.evaluate(step, model)

    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(read(spec["train"])),
        processing_class=tokenizer,
        callbacks=[Marking()],
    )
    trainer.train()
    trainer.save_model(settings.output_dir)


if __name__ == "__main__":
    main()
