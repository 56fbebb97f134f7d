"""``megarl diff``: one sequence through trainer and engine, and the first operation that differs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.core.errors import ConfigError, InputError, JobError

if TYPE_CHECKING:
    from megarl.config import Config
    from megarl.diff.causes import Cause
    from megarl.diff.operation_errors import Finding
    from megarl.engines.tracing.points import EngineTrace

DESCRIPTION = """Compute one sequence in the trainer's model and in an engine, operation by operation; name the first
that differs, and why.

Ends with status 1 if one differs (docs/alarms.md)."""
ENGINE = "megarl.engines.tracing.traced_engine"
SAMPLED = 8
"""Tokens that the engine samples after the sequence."""
TEXT = "A farmer has 17 sheep. All but 9 run away, then he buys 4 more. How many sheep does the farmer have? "
"""Text of a model without a run, repeated."""
TIMEOUT_S = 600.0
Start = Callable[[Sequence[str], Mapping[str, str], Path], Callable[[], object]]
"""Starts a command line with more environment and a log; returns a function that waits for its end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``megarl diff``."""
    parser.add_argument("model", metavar="RUN|MODEL", help="directory of a run (its last weights) or HF checkpoint")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="trajectory of the run, from 0")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="most tokens (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; return 1 if an operation differs, else 0. Raises InputError or JobError."""
    from megarl.config import compose
    from megarl.weights.megatron_private import silence

    silence()
    place = Path(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        if (place / "resolved.json").is_file():
            sequence = _of_run(place, Path(folder), arguments.row, arguments.tokens)
        else:
            from megarl.run.launch.subjects import subject_of

            subject = subject_of(arguments.model)
            subject.convert(Path(folder))
            path = subject.hf_path(Path(folder))
            config = compose([f"model.path={json.dumps(str(path))}"])
            sequence = _of_model(config, _stored_dtype(path), arguments.tokens)
        found = diff(sequence, Path(folder))
    sys.stdout.write(found.text())
    return 1 if found.first is not None else 0


@dataclass(frozen=True)
class DiffSequence:
    """The sequence to compare.

    Attributes:
        config: Settings; ``model.path`` is an HF checkpoint.
        tokens: Token ids.
        messages: The conversation that both chat templates render; None without a template.
        kwargs: Further arguments of the chat template.
    """

    config: Config
    tokens: list[int]
    messages: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diff:
    """The comparison: every operation, and the cause of the first that differs."""

    findings: list[Finding]
    first: Finding | None
    cause: Cause | None
    seconds: float

    def text(self) -> str:
        """Return the table: the worst operation of each kind, those that differ, and one sentence."""
        from megarl.run.data.open_run import table

        worst: dict[str, Finding] = {}
        for finding in self.findings:
            own = worst.setdefault(finding.operation, finding)
            if own.error < finding.error and not own.differs:
                worst[finding.operation] = finding
        rows = [
            [f.operation, str(f.layer), f"{f.error:.1e}", f"{f.tolerance:.0e}", "DIFFERS" if f.differs else ""]
            for f in worst.values()
        ]
        text = table([["operation", "layer", "largest error", "tolerance", ""], *rows]) + "\n"
        if self.first is None or self.cause is None:
            return f"{text}{len(self.findings)} comparisons agree, in {self.seconds:.0f} s\n"
        where = f"layer {self.first.layer}, {self.first.operation}, token {self.first.token}"
        return f"{text}first difference: {where}\ncause: {self.cause.name}: {self.cause.text}\n"


def diff(sequence: DiffSequence, folder: Path, start: Start | None = None) -> Diff:
    """Compute the sequence on both sides and compare.

    Args:
        folder: For the request and the trace.
        start: Runs the engine's process; None starts one.

    Raises:
        JobError: the engine's process fails.
    """
    from megarl.diff.causes import cause_of
    from megarl.diff.operation_errors import compare, first
    from megarl.diff.trainer_trace import TrainerModel

    began = time.monotonic()
    argv, environment = traced_process(sequence, folder)
    wait = (start or _start)(argv, environment, folder / "engine.log")
    trainer = TrainerModel(sequence.config)  # while the engine starts
    wait()
    engine = _trace(folder)
    temperature = sequence.config.rollout.temperature
    record, logp, scaled = trainer.trace(engine, temperature=temperature)
    findings = compare(engine, record, logp, scaled, _rendered(sequence))
    worst = first(findings)
    cause = None
    if worst is not None:
        cause = cause_of(worst, engine, record, trainer.window(worst.layer), temperature)
    return Diff(findings, worst, cause, time.monotonic() - began)


def traced_process(sequence: DiffSequence, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the request; return the engine's command line and environment: the run's, on one worker."""
    import torch

    from megarl.engines.tracing.traced_engine import REQUEST
    from megarl.run.supervise.process_specs import engine_process

    config = sequence.config
    needed = len(sequence.tokens) + SAMPLED + 1
    rollout = replace(
        config.rollout, tp=1, pp=1, nodes=1, expert_parallel=False, speculative="none", routing_replay=False,
        enforce_eager=True, max_num_seqs=4, max_trajectory_tokens=None, max_response_tokens=SAMPLED + 1,
        max_prompt_tokens=needed - SAMPLED - 1,
    )  # fmt: skip
    device: Literal["cpu", "cuda"] = (
        "cuda" if config.parallel.backend == "nccl" and torch.cuda.is_available() else "cpu"
    )
    argv, environment = engine_process(config.model.path, rollout, config.model, "127.0.0.1", 0, device)
    argv[argv.index("megarl.engines.server.server")] = ENGINE
    request = {
        "tokens": sequence.tokens,
        "messages": sequence.messages,
        "kwargs": sequence.kwargs,
        "sampling": {"temperature": rollout.temperature},
        "sampled": SAMPLED,
        "files": config.model.path,
        "output": str(folder / "trace.pt"),
    }
    (folder / "request.json").write_text(json.dumps(request))
    environment |= {REQUEST: str(folder / "request.json"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return argv, environment


def _start(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Callable[[], object]:
    with open(log, "wb") as output:
        process = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)

    def wait() -> None:
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()

    return wait


def _trace(folder: Path) -> EngineTrace:
    """Read the engine's trace. Raises JobError with the log's end if there is none."""
    import torch

    from megarl.engines.tracing.points import EngineTrace

    file = folder / "trace.pt"
    if not file.is_file():
        end = (folder / "engine.log").read_text(errors="replace")[-2000:]
        raise JobError(f"the engine has computed no trace; the end of its log:\n{end}")
    return EngineTrace(**torch.load(file, weights_only=True))


def _rendered(sequence: DiffSequence) -> list[int] | None:
    from megarl.tasks import ChatTokenizer

    if sequence.messages is None:
        return None
    ids: list[int] = ChatTokenizer.of(sequence.config).prompt_ids(sequence.messages, sequence.kwargs).tolist()
    return ids


def _stored_dtype(path: Path) -> Literal["float32", "bfloat16"]:
    """Return the dtype of an HF checkpoint, by its config.json; float32 if megarl does not compute with it."""
    from megarl.weights.checkpoint.formats.hf_source import read_hf_config

    config = read_hf_config(path)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "bfloat16" if dtype == "bfloat16" else "float32"


def _of_model(config: Config, dtype: Literal["float32", "bfloat16"], most: int) -> DiffSequence:
    """Return a text by the model's tokenizer, and its conversation if there is a chat template."""
    from megarl.tasks import ChatTokenizer
    from megarl.tasks.templates.tokenizer import read_tokenizer

    ids = read_tokenizer(Path(config.model.path) / "tokenizer.json").encode(TEXT * (1 + most // 20)).ids[:most]
    config = replace(config, model=replace(config.model, dtype=dtype))
    messages: list[dict[str, Any]] | None = [{"role": "user", "content": TEXT}]
    try:
        ChatTokenizer.of(config)
    except InputError:  # a model that was not trained on conversations
        messages = None
    return DiffSequence(config, ids, messages)


def _of_run(place: Path, folder: Path, row: int, most: int) -> DiffSequence:
    """Return a stored trajectory of a run, up to its last turn of the model, and the run's last weights. Raises
    ConfigError."""
    from megarl.buffer.store import Selection
    from megarl.run.data.open_run import stored_run
    from megarl.run.launch.subjects import subject_of

    with stored_run(place, Selection()) as run:
        groups = [group.group_id for few in run.store.selection.groups(Selection()) for group in few]
        members = [one for one in run.store.selection.members(groups) if one.turns and not one.images]
        if not 0 <= row < len(members):
            raise ConfigError(f"--row {row}: {place} has {len(members)} stored trajectories of text, numbered from 0")
        chosen = members[row]
        task = run.store.selection.tasks_named([chosen.task_id]).get(chosen.task_id)
        config = run.config
    subject = subject_of(f"run:{place}")
    subject.convert(folder, config.model.dtype)
    path = subject.hf_path(folder)
    config = replace(config, model=replace(config.model, path=str(path)))
    at = max((i for i, turn in enumerate(chosen.turns) if turn.author == "model"), default=0)
    line: list[int] = []
    while at >= 0:
        line = [*map(int, chosen.turns[at].token_ids), *line]
        at = chosen.turns[at].follows
    messages = None if task is None or task.images else list(task.prompt)
    return DiffSequence(config, line[:most], messages, {} if task is None else task.chat_template_kwargs)
