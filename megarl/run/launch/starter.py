"""``megarl init``: writes a ready-to-run folder with an experiment, its rows, its Python file and a job script."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megarl.config.load import config_dir
from megarl.core.errors import ConfigError

Kind = Literal["rows", "sft", "dpo", "agent", "environment"]

DESCRIPTION = """Write a folder for a job of your own: experiment, example rows, job script, and a reward or agent file.

    megarl init my_run --kind rows
    megarl train --config-dir my_run experiment=my_run

On a terminal the command asks for options that are left out; otherwise they take their defaults."""

SUMS = {"train": ("2 + 3", "4 + 1", "6 + 2"), "eval": ("3 + 3", "1 + 7", "5 + 4")}
"""Questions of the example rows, by split."""


class Starter(NamedTuple):
    """Files and settings of one kind of training."""

    purpose: str
    """One-line purpose of the kind, for the help and the experiment."""
    row: Callable[[str, str], dict[str, Any]]
    """Function that makes an example row from a question and its answer."""
    settings: dict[str, Any]
    """Settings of the experiment in addition to the common ones. A value ``FILE`` is replaced by the path of
    ``file``."""
    file: str | None = None
    """Name of the Python file."""
    code: str = ""
    """Content of the Python file."""
    algorithm: str = "grpo"
    lr: str = "1.0e-6"
    """Learning rate for a given model; the model made from scratch has 1.0e-3."""


def _task(question: str, answer: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{question} ="}]
    return {"data_source": "mine", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": answer}}


def _demonstration(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{question} ="}, {"role": "assistant", "content": answer}]}


def _preference(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": f"{question} =", "chosen": answer, "rejected": str(int(answer) + 1)}


FILE = "FILE"
REWARD = '''"""Reward of a response (docs/rewards.md). It is called in a reward worker, by keyword."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 where the response ends with the row's ground truth."""
    return float(solution_str.strip().endswith(ground_truth))
'''
AGENT = '''"""An agent whose model is the one in training (docs/agents.md)."""

import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def run(base_url, prompt, request_kwargs, metadata):
    """Answer twice, the second time after looking again; return the reward."""
    model, messages = client.with_options(base_url=base_url), list(prompt)
    draft = await model.chat.completions.create(messages=messages, **request_kwargs)
    messages += [draft.choices[0].message, {"role": "user", "content": "Check it."}]
    last = await model.chat.completions.create(messages=messages, **request_kwargs)
    return float((last.choices[0].message.content or "").strip().endswith(metadata["ground_truth"]))
'''
ENVIRONMENT = '''"""An environment in which the model acts, turn by turn (docs/environments.md)."""

from megarl.explore.environments import Observation


class Game:
    """An episode: three tries to give the ground truth."""

    def __init__(self, task):
        self.wanted, self.tries = task.ground_truth, 3

    def step(self, response):
        """Return the next message, the reward of the response, and whether the episode is over."""
        self.tries -= 1
        right = response.strip().endswith(self.wanted)
        return Observation("again", reward=float(right), done=right or not self.tries)

    def close(self):
        """Free what the episode holds."""


make = Game
'''
KINDS: dict[Kind, Starter] = {
    "rows": Starter(
        "reinforcement learning (GRPO) on rows with a reward function",
        _task,
        {"reward": {"path": FILE}},
        "reward.py",
        REWARD,
    ),
    "sft": Starter("supervised fine-tuning on demonstrations", _demonstration, {}, algorithm="sft", lr="1.0e-5"),
    "dpo": Starter("DPO on pairs of a chosen and a rejected response", _preference, {}, algorithm="dpo"),
    "agent": Starter(
        "reinforcement learning (GRPO) of an agent that calls the model over HTTP",
        _task,
        {"rollout": {"workflow": "agent", "agent": FILE, "agent_rewards": True}},
        "agent.py",
        AGENT,
    ),
    "environment": Starter(
        "reinforcement learning (GRPO) in an environment of several turns",
        _task,
        {"rollout": {"workflow": "environment", "environment": FILE}},
        "environment.py",
        ENVIRONMENT,
    ),
}
OFFLINE = ("sft", "dpo")
"""Kinds that train on files only, without engines."""
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
"""Sizes of the default model from scratch: it shows that the job runs, and learns little."""


class Answers(NamedTuple):
    """Five answers that determine a folder."""

    kind: Kind
    name: str
    """Name of the experiment and of its run."""
    model: str
    """Directory or hub name of the model; empty makes a tiny one from scratch."""
    gpus: int
    """GPUs per node; 0 trains on CPUs."""
    nodes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``megarl init``."""
    kinds = "; ".join(f"{kind}: {starter.purpose}" for kind, starter in KINDS.items())
    parser.add_argument("folder", metavar="DIR", help="folder to make")
    parser.add_argument("--kind", choices=list(KINDS), help=f"{kinds} (default rows)")
    parser.add_argument("--name", help="name of the experiment (default: the folder's)")
    parser.add_argument("--model", help="directory or hub name of a model (default: a tiny one is made from scratch)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node; 0 (default) trains on CPUs")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job script (default 1)")


def run(arguments: argparse.Namespace) -> None:
    """Ask for missing answers, write the folder and print the next commands. Raises ConfigError as ``write``."""
    folder = Path(arguments.folder).absolute()

    def answer(given: Any, question: str, default: Any) -> str:
        if given is not None or not sys.stdin.isatty():
            return str(default if given is None else given)
        return input(f"{question} [{default}]: ").strip() or str(default)

    given = answer(arguments.kind, f"Kind of training ({', '.join(KINDS)})", "rows")
    kind = next((kind for kind in KINDS if kind == given), None)
    if kind is None:
        raise ConfigError(f"kind {given!r}: give one of {', '.join(KINDS)}")
    answers = Answers(
        kind,
        answer(arguments.name, "Name", re.sub(r"\W", "_", folder.name)),
        answer(arguments.model, "Model: directory or hub name, empty for a tiny one from scratch", ""),
        _number(answer(arguments.gpus_per_node, "GPUs of a node, 0 for CPUs", 0), "--gpus-per-node", 0),
        _number(answer(arguments.nodes, "Nodes", 1), "--nodes", 1),
    )
    for path in write(folder, answers):
        logging.info("wrote %s", path)
    command = f"megarl train --config-dir {arguments.folder} experiment={answers.name}"
    elsewhere = f" --nodes {answers.nodes} --gpus-per-node {answers.gpus}" if answers.gpus else ""
    # The job script gives several nodes one database; one command cannot start them.
    elsewhere += " store=postgres" * (answers.nodes > 1)
    here = f"{command}\n" * (answers.nodes == 1)
    sys.stdout.write(f"{command} --check{elsewhere}\n{here}sbatch {arguments.folder}/job.sh\n")


def _number(text: str, option: str, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{option}={text}: give a whole number of {least} or more")
    return int(text)


def write(folder: Path, answers: Answers) -> list[Path]:
    """Write the files of a folder and return their paths.

    Raises:
        ConfigError: a file exists already, the name is invalid or taken, or GPUs are requested without a model.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", answers.name):
        raise ConfigError(f"--name={answers.name}: give letters, digits, - and _")
    if (config_dir() / "experiment" / f"{answers.name}.yaml").exists():
        raise ConfigError(f"--name={answers.name} is an experiment of megarl; give another --name")
    if answers.gpus and not answers.model:
        raise ConfigError(f"--gpus-per-node={answers.gpus} needs --model: the tiny model is for CPUs")
    starter = KINDS[answers.kind]
    texts = {
        f"experiment/{answers.name}.yaml": _experiment(folder, answers),
        "train.jsonl": _rows(starter, "train"),
        "eval.jsonl": _rows(starter, "eval"),
        "job.sh": _job_script(folder, answers),
    }
    if starter.file is not None:
        texts[starter.file] = starter.code
    paths = [folder / name for name in texts]
    if there := [path for path in paths if path.exists()]:
        raise ConfigError(f"{there[0]} exists already; give a folder without it")
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "job.sh").chmod(0o755)
    return paths


def _rows(starter: Starter, split: str) -> str:
    rows = [starter.row(question, str(sum(map(int, question.split(" + "))))) for question in SUMS[split]]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _experiment(folder: Path, answers: Answers) -> str:
    starter, on_gpus = KINDS[answers.kind], answers.gpus > 0
    shared = ["base/gpu"] * on_gpus + ["base/turns"] * (on_gpus and answers.kind not in OFFLINE)
    grid = [] if on_gpus else [{"override /parallel": "dp2"}]
    lr = starter.lr if answers.model else "1.0e-3"
    settings: dict[str, Any] = {
        "defaults": [*shared, *grid, {"override /algorithm": starter.algorithm}, "_self_"],
        "run": {"name": answers.name, "dir": str(folder / "run")},
        "model": {"path": answers.model} if answers.model else {"path": "${run.dir}/model", "from_scratch": TINY},
        "taskset": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")},
        "trainer": {
            "steps": 100,
            "tasks_per_step": len(SUMS["train"]),
            "updates_per_step": 1,
            "eval_interval": 10,
            "checkpoint_interval": 10,
            "optimizer": {"lr": float(lr)},
        },
    }
    for group, values in starter.settings.items():
        made = {name: str(folder / str(starter.file)) if value == FILE else value for name, value in values.items()}
        settings[group] = settings.get(group, {}) | made
    if answers.kind not in OFFLINE:
        settings.setdefault("rollout", {})["max_response_tokens"] = 1024 if answers.model else 16
    if on_gpus:
        tp = 2 if answers.gpus % 2 == 0 else 1
        settings["parallel"] = {"tp": tp, "dp": answers.gpus * answers.nodes // tp}
        if answers.kind not in OFFLINE:
            settings["rollout"]["replicas"] = answers.gpus * answers.nodes
    from omegaconf import OmegaConf

    head = (
        "# @package _global_\n"
        f"# {starter.purpose[0].upper()}{starter.purpose[1:]}.\n"
        "# docs/settings.md lists every setting. trainer.tasks_per_step is the number of rows of a step: raise it\n"
        "# once train.jsonl has your rows. Columns with other names: taskset.columns (docs/tasksets.md#rows).\n"
    )
    return head + OmegaConf.to_yaml(settings)


def _job_script(folder: Path, answers: Answers) -> str:
    checkout = config_dir().parent
    home = checkout if (checkout / "slurm" / "common.sh").is_file() else "PATH_OF_MEGARLS_CHECKOUT"
    gpus = f"#SBATCH --gpus-per-node={answers.gpus}\n" if answers.gpus else ""
    return f"""#!/usr/bin/env bash
# sbatch {folder / "job.sh"} [overrides]: docs/cluster.md. Many clusters ask for two lines more:
# #SBATCH --account=...
# #SBATCH --partition=...
#SBATCH --job-name={answers.name}
#SBATCH --nodes={answers.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/%x-%j.log
export MEGARL_HOME=${{MEGARL_HOME:-{home}}}
source "$MEGARL_HOME/slurm/common.sh"
megarl_train store=postgres cluster.restarts=3 run.shutdown_grace_s=150 -- \\
  --config-dir {folder} experiment={answers.name} "$@"
"""
