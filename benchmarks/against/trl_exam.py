"""Faults of ``megarl exam`` in TRL's trainers, one at a time: what TRL says of each. `exam_trl.py` starts this.

    python trl_exam.py SPEC.json [NAME …]

SPEC has ``model``, ``train``, ``eval``, ``folder``, ``outcomes``. A run is a few updates on a CPU. TRL has *noticed* a
fault if the run ends with an error, or if its log has a warning that the clean run of the same job does not have. It
offers nothing else: its metrics have no bounds. A fault counts only if a recorded value of the run differs from the
clean run's: rewards, tokens, mask, advantages, loss, gradient, weights, learning rate, evaluation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl_faults import FAULTS, Course, Fault, text_of
from trl_grpo import read, score

LIMIT_S = 240
"""Longest run."""
EXACT = 1e-6
"""Largest relative difference of two values that count as equal."""
COMMON: Mapping[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "model_init_kwargs": {"dtype": "float32"},
    "seed": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
GRPO: Mapping[str, Any] = {
    **COMMON,
    "steps_per_generation": 2,
    "num_generations": 8,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "beta": 0.0,
    "max_completion_length": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
}


@dataclass(frozen=True)
class Job:
    """A small run.

    Attributes:
        settings: Besides ``GRPO``, or those of DPO.
        rewards: Names of reward functions.
        rows: Number of training rows.
        stop: Update after which the run stops and is resumed.
        make: Changes the course before the run, with or without a fault.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ("score",)
    rows: int = 300
    stop: int | None = None
    kind: str = "grpo"


JOBS: Mapping[str, Job] = {
    "tiny": Job(),
    "accumulated": Job({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}),
    "kl": Job({"beta": 0.5}),
    "few": Job(rows=8),
    "wide": Job(rewards=("twice",)),
    "overlong": Job(rewards=("score", "overlong")),
    "unscored": Job(rewards=("unscored",)),
    "terse": Job({"chat_template_kwargs": {"terse": True}}),
    "padded-by-end": Job(kind="padded-by-end"),
    "experts": Job(
        {"router_aux_loss_coef": 0.1, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        kind="experts",
    ),
    "evaluated": Job({"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 24}),
    "resume": Job({"save_strategy": "steps", "save_steps": 2}, stop=2),
    "dpo": Job({"per_device_train_batch_size": 8, "max_length": None}, kind="dpo"),
}


# ---------------------------------------------------------------- what a run records


class Recorder(TrainerCallback):
    """Values of a run in their order: (stage, value), the value a number or a digest."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float | str]] = []

    def add(self, stage: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = hashlib.sha256(value.detach().contiguous().cpu().numpy().tobytes()).hexdigest()[:12]
        self.values.append((stage, value))

    def watch(self, trainer: Any) -> None:
        """Record what a trainer computes, around all that a fault has changed."""
        compute = trainer._compute_loss

        def loss(model: Any, inputs: Any, *args: Any) -> Any:
            mask = inputs["completion_mask"]
            ids = inputs["completion_ids"] if "completion_ids" in inputs else inputs["input_ids"]
            for stage, value in (("prompts", inputs.get("prompt_ids")), ("tokens", ids), ("mask", mask)):
                if value is not None:
                    self.add(stage, value.long())
            for stage in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
                if stage in inputs:
                    self.add(stage, float(inputs[stage].double().square().sum()))
            found = compute(model, inputs, *args)
            self.add("loss", float((found[0] if isinstance(found, tuple) else found).detach()))
            return found

        trainer._compute_loss = loss
        if isinstance(trainer, GRPOTrainer):
            calculate = trainer._calculate_rewards

            def rewards(*args: Any) -> Any:
                found = calculate(*args)
                self.add("rewards", found.nan_to_num(-99.0).double())
                return found

            trainer._calculate_rewards = rewards
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        parts = [each.grad.double().square().sum() for each in model.parameters() if each.grad is not None]
        self.add("gradients", float(len(parts)))
        self.add("gradient", math.sqrt(float(sum(parts))))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.add("weights", float(sum(each.double().abs().sum() for each in model.parameters())))
        self.add("learning rate", float(more["lr_scheduler"].get_last_lr()[0]))
        self.add("update", float(state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        for name in ("eval_reward", "eval_loss"):
            self.add(name, float(metrics.get(name) or 0.0))


class Heard(logging.Handler):
    """Warnings of a run: of all loggers, and of Python's ``warnings``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        for name in (None, "transformers", "trl", "accelerate", "datasets"):
            logging.getLogger(name).addHandler(self)
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **more: self.lines.append(str(message))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said(lines: list[str]) -> dict[str, str]:
    """Beginning without numbers -> line. What follows in a line are values of rows."""
    return {re.sub(r"\d+", "0", line)[:60]: line for line in lines}


def difference(clean: list[Any], found: list[Any]) -> str:
    """Name the first value that differs; empty if none does."""
    counts: dict[str, int] = {}
    for (stage, own), (other_stage, other) in zip(clean, found, strict=False):
        counts[stage] = counts.get(stage, 0) + 1
        if stage != other_stage:
            return f"{other_stage} where {stage} comes"
        if isinstance(own, str):
            if own != other:
                return f"{stage}, {counts[stage]}: others"
        elif not math.isclose(own, other, rel_tol=EXACT, abs_tol=1e-12) and not (math.isnan(own) and math.isnan(other)):
            return f"{stage}, {counts[stage]}: {other:.6g}, not {own:.6g}"
    return "" if len(clean) == len(found) else f"{len(found)} values, not {len(clean)}"


# ---------------------------------------------------------------- runs


def preferences(path: str) -> list[dict[str, Any]]:
    """Pairs of the right answer and one that is ten higher."""
    return [
        {
            "prompt": row["prompt"],
            "chosen": [{"role": "assistant", "content": row["truth"]}],
            "rejected": [{"role": "assistant", "content": str(int(row["truth"]) + 10 ** (i % 3))}],
        }
        for i, row in enumerate(read(path))
    ]


def functions(names: tuple[str, ...], length: int) -> list[Any]:
    """Reward functions by name."""

    def one(completions: list[Any], truth: list[str], **more: Any) -> list[float]:
        return [score(text_of(each), right) for each, right in zip(completions, truth, strict=True)]

    def twice(completions: list[Any], truth: list[str], **more: Any) -> list[float]:
        return [2.0 * value for value in one(completions, truth)]

    def unscored(completions: list[Any], truth: list[str], **more: Any) -> list[float | None]:
        return [None if i % 4 == 1 else value for i, value in enumerate(one(completions, truth))]

    known = {"score": one, "twice": twice, "unscored": unscored, "overlong": get_soft_overlong_punishment(length, 6)}
    return [known[name] for name in names]


def experts(folder: Path, tokenizer: Any) -> str:
    """Save an untrained model with eight experts once; return its path."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(1)
        config = transformers.Qwen3MoeConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3,
            max_position_embeddings=160, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )  # fmt: skip
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Stopping(TrainerCallback):
    """Ends a run after an update."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.at:
            control.should_save = control.should_training_stop = True


def start(spec: Mapping[str, Any], job: Job, course: Course, settings: Mapping[str, Any], folder: Path) -> Any:
    """Make a trainer."""
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    if job.kind == "padded-by-end":
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template += "{% if terse is defined %}={% endif %}"
    made = {**(COMMON if job.kind == "dpo" else GRPO), **job.settings, **settings, "output_dir": str(folder)}
    rows = Dataset.from_list(course.train)
    if job.kind == "dpo":
        return DPOTrainer(model=spec["model"], args=DPOConfig(**made), train_dataset=rows, processing_class=tokenizer)
    return GRPOTrainer(
        model=experts(Path(spec["folder"]) / "experts", tokenizer) if job.kind == "experts" else spec["model"],
        reward_funcs=functions(job.rewards, made["max_completion_length"]),
        args=GRPOConfig(**made),
        train_dataset=rows,
        eval_dataset=Dataset.from_list(course.eval),
        processing_class=tokenizer,
    )


def run(spec: Mapping[str, Any], name: str, settings: Mapping[str, Any], fault: Fault | None, folder: Path) -> Any:
    """Run a job in this process; return what it recorded and what was heard."""
    torch.set_num_threads(1)
    job, recorder, heard, error = JOBS[name], Recorder(), Heard(), ""
    train = preferences(spec["train"]) if job.kind == "dpo" else read(spec["train"])
    course = Course(train[: job.rows], read(spec["eval"]))
    if fault is not None:
        fault.install(course)  # an error here is ours
    try:
        stops = [job.stop] if job.stop is not None else []
        for at in [*stops, None]:
            checkpoint = folder / f"checkpoint-{job.stop}" if stops and at is None else None
            if checkpoint is not None:
                for act in course.again:
                    act(checkpoint)
            trainer = start(spec, job, course, settings, folder)
            for act in course.made:
                act(trainer)
            recorder.watch(trainer)
            if at is not None:
                trainer.add_callback(Stopping(at))
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Exception as found:
        traceback.print_exc()
        error = f"{type(found).__name__}: {found}"
    return {"values": recorder.values, "lines": heard.lines, "error": error}


def forked(work: Callable[[], Any], log: Path) -> Any:
    """Do work in a child, so that no patch outlives it; return its result. Raises RuntimeError naming the log."""
    result = log.with_suffix(".result")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with log.open("wb") as output:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
            result.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    for _ in range(LIMIT_S * 10):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"status {status}: {log}")
    return json.loads(result.read_text())


def main() -> None:
    spec, only = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    folder, path = Path(spec["folder"]), Path(spec["outcomes"])
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = json.loads(path.read_text())["faults"] if path.is_file() else {}
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    experts(folder / "experts", tokenizer)
    clean: dict[str, Any] = {}
    repeated = set[str]()

    def result(name: str, job: str, settings: Mapping[str, Any], fault: Fault | None) -> Any:
        own = folder / name
        shutil.rmtree(own, ignore_errors=True)
        found = forked(lambda: run(spec, job, settings, fault, own), folder / f"{name}.log")
        shutil.rmtree(own, ignore_errors=True)
        return found

    for fault in FAULTS:
        if (only and fault.name not in only) or (not only and fault.name in outcomes):
            continue
        key = f"clean-{fault.job}-{hashlib.sha256(json.dumps(dict(fault.settings)).encode()).hexdigest()[:6]}"
        if key not in clean:
            clean[key] = result(key, fault.job, fault.settings, None)
            again = result(key, fault.job, fault.settings, None) if fault.job not in repeated else clean[key]
            repeated.add(fault.job)
            if clean[key]["error"] or (other := difference(clean[key]["values"], again["values"])):
                raise RuntimeError(f"{key}: {clean[key]['error'] or other} in clean runs")
        try:
            found = result(fault.name, fault.job, fault.settings, fault)
        except RuntimeError as error:
            print(f"{fault.name}: {error}", flush=True)
            continue
        known = said(clean[key]["lines"])
        new = [line for start, line in said(found["lines"]).items() if start not in known]
        effect = difference(clean[key]["values"], found["values"])
        noticed = f"error: {found['error']}" if found["error"] else f"warning: {new[0]}" if new else ""
        outcomes[fault.name] = {"job": fault.job, "effect": effect, "noticed": noticed[:300]}
        print(f"{fault.name}: {effect or 'NO EFFECT'} | {noticed[:160] or 'nothing'}", flush=True)
        versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        path.write_text(json.dumps({"versions": versions, "faults": outcomes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
