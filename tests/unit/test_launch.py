"""Every input that cannot work is refused with the rule, the value and the mend, before any process is launched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl import algorithms
from megarl.config import Config, compose, config_dir
from megarl.errors import ArchitectureError, CheckpointError, ConfigError, DataError, JobError
from megarl.launch import job, ports
from megarl.launch.guard import Guard, end
from megarl.launch.prepare import MODEL_RECIPE
from megarl.launch.process import Child
from megarl.launch.supervisor import StopRequest, next_attempt, own_run_dir, start_job, stop, watch
from megarl.rollout.engine import group_members
from megarl.schema import Task
from megarl.tasksets import read_rows
from megarl.tasksets.parquet import write_rows
from tests.unit.small_job import config_of


def refused(error: type[ValueError], config: Config, *words: str) -> None:
    """``check`` raises exactly ``error``, and its text has all ``words``; what exists already is not touched."""
    with pytest.raises(error) as raised:
        job.check(config)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def test_a_right_configuration_passes_again_and_writes_nothing(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    job.check(config_of(prepared))
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_unknown_key_names_the_nearest(prepared: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(prepared, "rollout.max_promt_tokens=3")
    assert "did you mean 'rollout.max_prompt_tokens'?" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tp=3"], ["parallel.tp=3", "num_attention_heads=4"]),
        (["parallel.tp=8"], ["parallel.tp=8", "num_attention_heads=4"]),
        (["parallel=pp2", "parallel.pp=3"], ["parallel.pp=3", "num_hidden_layers=4", "1, 2 or 4"]),
        (["parallel.dp=0"], ["parallel.dp=0", "at least 1"]),
        (["rollout.tp=3"], ["rollout.tp=3", "num_attention_heads=4", "[1, 2, 4]"]),
        (["rollout.replicas=0"], ["rollout.replicas=0", "at least 1"]),
        (["trainer.tasks_per_step=2", "algorithm.group_size=4", "trainer.updates_per_step=9"],
         ["trainer.updates_per_step=9", "8 rows"]),
        (["trainer.micro_batch_size=0"], ["trainer.micro_batch_size=0"]),
        (["trainer.logits_bytes=0"], ["trainer.logits_bytes=0", "leave it out"]),
        (["trainer.logits_bytes=255"], ["trainer.logits_bytes=255", "64 logits (256 bytes)", "at least 256"]),
        (["trainer.kernels=cuda"], ["trainer.kernels", "cuda", "megarl"]),
        (["rollout.temperature=0"], ["rollout.temperature=0"]),
        (["algorithm.name=grpoo"], ["grpoo", "grpo"]),
        (["algorithm.name=sft"], ["algorithm.name=sft", "advantages"]),
        (["algorithm.dual_clip=0.5"], ["algorithm.dual_clip", "0.5"]),
        (["algorithm.name=gspo"], ["algorithm.importance=token", "algorithm=gspo"]),
        (["algorithm=kimi_mirror_descent", "algorithm.correction=mask"], ["algorithm.correction=mask", "kimi_mirror_descent"]),
        (["algorithm.options.tau=2"], ["algorithm.options", "grpo has none"]),
        (["algorithm.name=/no/such.py"], ["algorithm.name=/no/such.py", "no such file"]),
        (["parallel=tp1", "parallel.sequence_parallel=true"], ["parallel.sequence_parallel", "parallel.tp"]),
        (["trainer.optimizer.decay_steps=10"], ["trainer.optimizer.decay_steps=10", "min_lr=None"]),
        (["reference.refresh=400"], ["reference.refresh=400"]),
        (["rollout.max_prompt_tokens=100", "rollout.max_response_tokens=100"],
         ["rollout.max_prompt_tokens + rollout.max_response_tokens = 200", "max_position_embeddings", "128"]),
        (["algorithm.group_size=1"], ["algorithm.group_size=1", "grpo"]),
        (["rollout.replicas=200"], ["rollout.replicas=200", "GiB"]),
        (["store.url=foo"], ["store.url=foo", "sqlite:///PATH"]),
        (["store.url=postgres://me:secret@x/y"], ["store.url=postgres://me:***@x/y"]),
        (["reward.path=/no/such/reward.py"], ["reward.path=/no/such/reward.py", "compute_score"]),
        (["taskset.warm_start=null"], ["taskset.warm_start", "response"]),
    ],
)  # fmt: skip
def test_setting_that_cannot_work(prepared: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        job.check(config_of(prepared, *overrides))
    assert type(raised.value) is ConfigError
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


@pytest.mark.parametrize("name", sorted(p.stem for p in (config_dir() / "algorithm").glob("*.yaml")))
def test_every_algorithm_passes(prepared: Path, name: str) -> None:
    config = config_of(prepared, f"algorithm={name}")
    assert config.algorithm.kl.coef == 0.2, "the quickstart's pull to the reference is every algorithm's"
    if algorithms.get(config.algorithm.name).offline:
        refused(ConfigError, config, f"algorithm.name={config.algorithm.name} learns from rows of a file")
        return
    job.check(config)
    if config.algorithm.aggregation == "seq_mean_token_sum_norm":
        assert config.algorithm.aggregation_length == config.rollout.max_response_tokens == 8
        assert compose([f"algorithm={name}", "~rollout.max_response_tokens"]).algorithm.aggregation_length == 64
    if config.algorithm.name not in ("kimi_mirror_descent", "online_dpo"):
        job.check(config_of(prepared, f"algorithm={name}", "algorithm.correction=truncate"))


OWN = """
from megarl.algorithms import Algorithm, Loss, terms
def advantage(reward, stats, config):
    return reward - stats.mean
def loss(batch, config):
    weights = terms.token_weights(batch.mask, batch.row, batch.num_rows, config, dtype=batch.logp.dtype)
    return Loss(-(weights * batch.advantages * batch.logp).sum(), {})
ALGORITHM = Algorithm(
    name="own", source="", roles=frozenset({"actor"}), needs=frozenset({"advantages"}), advantage=advantage,
    count=terms.denominator, loss=loss,
)
"""


def own(folder: Path, old: str = "", new: str = "") -> str:
    assert old in OWN
    (folder / "own.py").write_text(OWN.replace(old, new, 1) if old else OWN)
    return f"algorithm.name={folder / 'own.py'}"


def test_algorithm_of_ones_own(prepared: Path, tmp_path: Path) -> None:
    job.check(config_of(prepared, own(tmp_path), "algorithm.options.margin=0.5", "algorithm.group_size=1"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ALGORITHM =", "OTHER =", ["has nothing called ALGORITHM"]),
        ("ALGORITHM = Algorithm(", "ALGORITHM = dict(", ["a dict called ALGORITHM"]),
        ("import Algorithm,", "import Algoritm,", ["cannot be imported", "Algoritm", "own.py:2"]),
        ("return reward", "return (reward", ["cannot be imported", "SyntaxError"]),
        ("loss=loss", "loss=None", ["ALGORITHM.loss must be a function"]),
        ("advantage=advantage", "advantage=None", ["ALGORITHM.advantage must be a function"]),
        ('{"advantages"}', '{"value"}', ["ALGORITHM.needs has value;", "old_logp"]),
        ('{"actor"}', '{"judge"}', ["ALGORITHM.roles has judge", "critic"]),
        ('{"advantages"}', "set()", ["TypeError", "own.py:7"]),
        ("stats.mean", "stats.meen", ["AttributeError", "meen", "own.py:4"]),
        ("reward - stats.mean", "None", ["two numbers"]),
        ("batch.logp)", "batch.logp.detach())", ["depends on logp"]),
        (".sum(), {})", ", {})", ["scalar"]),
        ("{})", '{"a": 1.0})', ["each metric must be a pair"]),
        ("count=terms.denominator", "count=lambda *_: 1", ["count must give a scalar tensor"]),
        ("advantage=advantage", "advantage=None, estimate=advantage", ["TypeError", "own.py"]),
        ("advantage=advantage", "advantage=None, estimate=lambda step, c: 0", ["estimate must give a megarl.algorithms.Estimate"]),
        ("advantage=advantage", "advantage=None, choose_pairs=lambda r, c: []", ["neither advantage nor estimate"]),
        ("advantage=advantage", "advantage=advantage, choose_pairs=lambda r, c: [(0, 2)]", ["(chosen, rejected)", "(0, 2)"]),
    ],
)
def test_algorithm_of_ones_own_that_lacks_something(
    prepared: Path, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    refused(ConfigError, config_of(prepared, own(tmp_path, old, new)), *words)


def with_model(prepared: Path, path: Path, **changes: Any) -> list[str]:
    """Overrides for a copy of the prepared model whose config.json differs; None removes a key."""
    shutil.copytree(prepared / "model", path)
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return [f"model.path={path}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba2"}, ["'mamba2'", "supported: deepseek_v3, ernie4_5, "]),
        ({"model_type": None}, ["model_type=None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type='yarn'"]),
    ],
)
def test_model_without_a_table(prepared: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    refused(ArchitectureError, config_of(prepared, *with_model(prepared, tmp_path / "model", **changes)), *words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.ep=2"], ["parallel.tp=2 with the 8 experts", "parallel.sequence_parallel=true"]),
        (["parallel=pp2", "parallel.vpp=2"], ["parallel.vpp=2", "set parallel.vpp to 1"]),
        (["parallel=tp1", "parallel.ep=4"], ["parallel.ep=4", "does not divide the 1 ranks"]),
    ],
)
def test_grid_that_the_trainer_would_refuse(prepared: Path, tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = with_model(prepared, tmp_path / "model", **experts)
    refused(ConfigError, config_of(prepared, *model, *overrides), *words)


def test_grid_that_does_not_divide_the_vocabulary(prepared: Path, tmp_path: Path) -> None:
    model = with_model(
        prepared, tmp_path / "model", num_attention_heads=3, num_key_value_heads=3, vocab_size=100, intermediate_size=48
    )
    config = config_of(prepared, *model, "parallel=tp1", "rollout.tp=3")
    refused(ConfigError, config, "rollout.tp=3", "the padded vocabulary=128")


def test_model_directory_that_is_no_checkpoint(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"model.path={tmp_path}/nothing")
    config = replace(config, model=replace(config.model, from_scratch=None))
    refused(ConfigError, config, f"{tmp_path}/nothing", "config.json", "model.from_scratch")
    (tmp_path / "empty").mkdir()
    refused(ConfigError, config_of(prepared, f"model.path={tmp_path}/empty"), f"{tmp_path}/empty", "no config.json")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_damaged_tokenizer(prepared: Path, tmp_path: Path, file: str) -> None:
    model = with_model(prepared, tmp_path / "model")
    (tmp_path / "model" / file).write_text("{% if %}" if file.endswith("jinja") else "[1")
    refused(CheckpointError, config_of(prepared, *model), f"{tmp_path}/model", "cannot be read")


def test_model_of_other_making(prepared: Path, tmp_path: Path) -> None:
    """A user's own: to train it in the place of the one that the settings describe would go unnoticed."""
    model = with_model(prepared, tmp_path / "model")
    (tmp_path / "model" / MODEL_RECIPE).unlink()
    config = config_of(prepared, *model, "model.from_scratch.num_hidden_layers=2")
    refused(ConfigError, config, "model.from_scratch.num_hidden_layers=2", f"{tmp_path}/model", "has 4")


@pytest.mark.parametrize("left", [0, 1000, -4])
def test_weights_cut_short(prepared: Path, tmp_path: Path, left: int) -> None:
    model = with_model(prepared, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, left if left >= 0 else weights.stat().st_size + left)
    refused(CheckpointError, config_of(prepared, *model), str(weights))


# ---------------------------------------------------------------- data


def test_missing_file_without_a_generator(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"taskset.eval={tmp_path}/eval.parquet", "taskset.generate=null")
    refused(ConfigError, config, f"taskset.eval={tmp_path}/eval.parquet", "no such file")


def test_unknown_generator(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, f"taskset.eval={tmp_path}/eval.parquet", "taskset.generate=chain_summ")
    refused(ConfigError, config, "chain_summ", "chain_sum")


def rewritten(prepared: Path, split: str, path: Path, row: int, **changes: Any) -> str:
    """An override for a copy of a split's file in which some columns of one row differ; without a value the column goes."""
    table = pq.read_table(prepared / "data" / f"{split}.parquet", partitioning=None)
    rows = table.to_pylist()
    for name, value in changes.items():
        if value is Ellipsis:
            rows = [{k: v for k, v in r.items() if k != name} for r in rows]
        else:
            rows[row][name] = value
    pq.write_table(type(table).from_pylist(rows), path)
    return f"taskset.{split}={path}"


@pytest.mark.parametrize(
    ("split", "changes", "words"),
    [
        ("train", {"prompt": ...}, ["column 'prompt' is missing"]),
        ("eval", {"reward_model": ...}, ["column 'reward_model' is missing"]),
        ("train", {"prompt": []}, ["row 3", "prompt must be", "non-empty list"]),
        ("train", {"prompt": [{"role": "user", "content": ""}]}, ["row 3", "prompt[0].content"]),
        ("eval", {"prompt": [{"role": "robot", "content": "1 + 1"}]}, ["row 3", "prompt[0].role", "'robot'"]),
        ("train", {"data_source": ""}, ["row 3", "data_source must be"]),
        ("train", {"reward_model": {"style": "rule", "ground_truth": None}}, ["row 3", "reward_model.ground_truth"]),
        ("warm_start", {"response": None}, ["row 3", "response must be"]),
        ("warm_start", {"response": ...}, ["column 'response' is missing"]),
    ],
)
def test_malformed_row(prepared: Path, tmp_path: Path, split: str, changes: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "rows.parquet"
    refused(DataError, config_of(prepared, rewritten(prepared, split, path, 3, **changes)), str(path), *words)


def test_file_that_is_not_parquet(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("question,answer\n1+1,2\n")
    config = config_of(prepared, f"taskset.train={tmp_path}/rows.parquet")
    refused(DataError, config, f"{tmp_path}/rows.parquet", "not a readable parquet file")


def test_files_of_the_same_name_are_different_tasks(prepared: Path, tmp_path: Path) -> None:
    paths = [tmp_path / split / "rows.parquet" for split in ("train", "eval")]
    for path in paths:
        path.parent.mkdir()
    overrides = [rewritten(prepared, path.parent.name, path, 0) for path in paths]
    tasks = job.check(config_of(prepared, *overrides))
    assert [rows[7].task_id for rows in tasks.values()] == ["train/7", "eval/7"]


@pytest.mark.parametrize("source", ["my/own", "reasoning_gym/chain_summ"])
def test_data_source_without_a_verifier(prepared: Path, tmp_path: Path, source: str) -> None:
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, data_source=source)
    refused(DataError, config_of(prepared, override), "row 3", "taskset.train", repr(source), "reward.path")


def test_own_reward_function_takes_any_data_source(prepared: Path, tmp_path: Path) -> None:
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, data_source="my/own")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    job.check(config_of(prepared, override, f"reward.path={tmp_path}/reward.py"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def compute_score(data_source)\n    return 1.0\n", ["SyntaxError", "reward.py, line 1"]),
        ("\nimport no_such_module\n", ["no_such_module", "reward.py:2"]),
        ("def score(*_):\n    return 1.0\n", ["defines no function", "compute_score(data_source"]),
        ("\ndef compute_score(answer, truth):\n    return 1.0\n", ["TypeError", "data_source", "reward.py:2"]),
        ("def compute_score(solution_str, **_):\n    return solution_str + 1\n", ["TypeError", "reward.py:2", "row 0"]),
        ("def compute_score(**_):\n    return 'good'\n", ["must return a number", "'good'", "reward.py:1"]),
        ("def compute_score(**_):\n    while True: pass\n", ["no verdict within 1 s", "reward.timeout_s"]),
        ("import os\nos._exit(3)\n", ["ended with code 3", "reward.py"]),
    ],
    ids=["syntax", "import", "name", "signature", "raises", "result", "hangs", "exits"],
)
def test_own_reward_function_that_cannot_work(prepared: Path, tmp_path: Path, source: str, words: list[str]) -> None:
    (tmp_path / "reward.py").write_text(source)
    refused(ConfigError, config_of(prepared, f"reward.path={tmp_path}/reward.py", "reward.timeout_s=1"), *words)


def test_prompt_that_the_template_refuses_names_file_and_row(prepared: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    override = rewritten(prepared, "train", tmp_path / "rows.parquet", 3, prompt=messages)
    refused(DataError, config_of(prepared, override), f"{tmp_path}/rows.parquet: row 3", "role system")


@pytest.mark.parametrize("split", ["train", "warm_start"])
def test_held_out_question_among_the_others(prepared: Path, tmp_path: Path, split: str) -> None:
    rows, held_out = (read_rows(prepared / "data" / f"{name}.parquet") for name in (split, "eval"))
    question = held_out[2].prompt[-1]
    same = {**question, "content": f" {question['content'].upper()}  "}  # to a reader it is the same one
    leaked: list[Task] = [*rows[:5], replace(rows[5], prompt=(*held_out[2].prompt[:-1], same)), *rows[6:]]
    write_rows(tmp_path / "rows.parquet", leaked)
    config = config_of(prepared, f"taskset.{split}={tmp_path}/rows.parquet")
    refused(DataError, config, f"row 5 of taskset.{split}", "taskset.eval", same["content"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_prompt_longer_than_the_limit(prepared: Path, tmp_path: Path, split: str) -> None:
    long = [{"role": "user", "content": "1 + 2 + 3 + 4 " * 30}]
    override = rewritten(prepared, split, tmp_path / "rows.parquet", 3, prompt=long)
    refused(
        DataError,
        config_of(prepared, override),
        f"{tmp_path}/rows.parquet: row 3",
        "tokens",
        "rollout.max_prompt_tokens is 48",
    )


def test_demonstration_longer_than_the_context(prepared: Path, tmp_path: Path) -> None:
    override = rewritten(prepared, "warm_start", tmp_path / "rows.parquet", 3, response="1 2 3 4 " * 40)
    refused(DataError, config_of(prepared, override), "row 3 of taskset.warm_start", "context is 128")


# ---------------------------------------------------------------- ports and run directories


@pytest.fixture
def busy_port() -> Any:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use(prepared: Path, busy_port: int) -> None:
    refused(ConfigError, config_of(prepared, f"run.port={busy_port}"), f"port {busy_port}", "in use", "run.port")


def test_a_later_port_of_the_job_in_use(prepared: Path, busy_port: int) -> None:
    refused(ConfigError, config_of(prepared, f"run.port={busy_port - 2}"), "in use", f"run.port={busy_port - 2} takes")


def test_starting_on_a_port_in_use_launches_nothing(prepared: Path, busy_port: int, tmp_path: Path) -> None:
    config = config_of(prepared, f"run.port={busy_port}")
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    in_use = pytest.raises(ConfigError, match=f"port {busy_port} .* in use")
    with own_run_dir(tmp_path) as lock, Guard(lock) as guard, in_use:
        start_job(config, lock, guard)
    assert not (tmp_path / "logs").exists()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]


def test_port_that_is_none(prepared: Path) -> None:
    refused(ConfigError, config_of(prepared, "run.port=65535"), "run.port=65535", "65535")


def test_host_of_another_machine(prepared: Path) -> None:
    refused(ConfigError, config_of(prepared, "run.host=192.0.2.1"), "run.host=192.0.2.1", "this machine")


def test_chosen_ports_are_free_and_differ() -> None:
    chosen = ports.choose("127.0.0.1", 20, None)
    assert len(set(chosen)) == 20
    assert all(ports.is_free("127.0.0.1", port) for port in chosen)


def child(tmp_path: Path, code: str, **options: Any) -> Child:
    return Child("engine 0", [sys.executable, "-c", code], {}, tmp_path / "engine_0.log", **options)


def test_last_lines_begin_with_the_exception(tmp_path: Path) -> None:
    """A server that ends in order prints much after the cause of its end."""
    process = child(
        tmp_path,
        "print('hello'); print('(EngineCore) RuntimeError: no such head_dim'); [print('closing', i) for i in range(90)]",
    )
    assert process.wait(30)
    assert process.tail().splitlines() == [
        "(EngineCore) RuntimeError: no such head_dim",
        "...",
        *(f"closing {i}" for i in range(70, 90)),
    ]


def test_last_lines_are_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "engine_0.log").write_text("ValueError: of an earlier one\n")
    silent = child(tmp_path, "")
    assert silent.wait(30)
    assert silent.tail() == "(it printed nothing)"
    bar = child(tmp_path, "print('10%\\r20%', end='')")
    assert bar.wait(30)
    assert bar.tail().splitlines() == ["10%", "20%"]


def test_what_a_process_prints_is_shown_to_its_last_byte(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    process = child(tmp_path, "import sys; sys.stdout.write('x' * 300_000 + 'end')", echo=True)
    assert process.wait(30)
    assert capfdbinary.readouterr().err == b"x" * 300_000 + b"end"


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ends; and it can still print, so that its own end is an orderly one."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom megarl.launch.process import Child\n"
        'words = \'import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print("told to end"))); print("up", flush=True); time.sleep(60)\'\n'
        f"child = Child('c', [sys.executable, '-c', words], {{}}, Path({str(tmp_path / 'c.log')!r}))\n"
        "while 'up' not in Path(child.log).read_text():\n    time.sleep(0.05)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and _read(Path(f"/proc/{pid}/cmdline")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "c.log").read_text() == "up\ntold to end\n"


TRAINER = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit({status}))); print('up', flush=True); time.sleep(60)"


def watch_stopping(tmp_path: Path, trainer: str, *, engine_dies: bool = False) -> None:
    """``watch`` a job that is asked to stop."""
    codes = {"engine 0": "import time; time.sleep(60)", "trainer rank 0": trainer}
    children = [Child(name, [sys.executable, "-c", code], {}, tmp_path / name) for name, code in codes.items()]
    while "up" not in (tmp_path / "trainer rank 0").read_text():
        time.sleep(0.02)
    request = StopRequest()
    request.count = 1
    if engine_dies:
        children[0].signal(signal.SIGTERM)
        assert children[0].wait(10)
    watch(children, request, shutdown_grace_s=20)
    assert all(child.poll() is not None for child in children)


def test_stop_of_a_whole_session_is_a_stop(tmp_path: Path) -> None:
    """Slurm and systemd signal every process: an engine that ends first does not keep the trainer from saving."""
    watch_stopping(tmp_path, TRAINER.format(status=0), engine_dies=True)


def test_stop_before_a_trainer_listens_is_a_stop(tmp_path: Path) -> None:
    watch_stopping(tmp_path, "import time; print('up', flush=True); time.sleep(60)")


def test_trainer_that_fails_while_it_stops_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="trainer rank 0 ended with status 3"):
        watch_stopping(tmp_path, TRAINER.format(status=3))


def test_guard_kills_what_does_not_end(tmp_path: Path) -> None:
    """A whole group, whatever its leader does; one that has ended already is no trouble."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    deaf, gone = child(tmp_path, code), child(tmp_path, "")
    deadline = time.monotonic() + 30
    assert gone.wait(30)
    while len(group_members(deaf.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    deaf.signal(signal.SIGTERM)
    end([deaf.pid, gone.pid], after_s=0.5)
    assert deaf.wait(30) and deaf.poll() == -signal.SIGKILL
    while group_members(deaf.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ended_by", ["guard", "supervisor"])
def test_shared_memory_that_is_made_late_is_removed(tmp_path: Path, ended_by: str) -> None:
    """By an engine that was starting when its job was told to end, and had to be killed."""
    segment = Path(f"/dev/shm/{tmp_path.parent.name}-{tmp_path.name}")
    code = (
        "import mmap, signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1); "
        f"file = open({str(segment)!r}, 'w+b'); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096); time.sleep(600)"
    )
    deaf = child(tmp_path, code)
    while "up" not in deaf.log.read_text():
        time.sleep(0.02)
    if ended_by == "guard":
        end([deaf.pid], after_s=3)
    else:
        stop([deaf], grace_s=3)
    assert deaf.wait(30) and deaf.poll() == -signal.SIGKILL
    assert not segment.exists()


def test_guard_waits_for_what_ends_by_itself(tmp_path: Path) -> None:
    with own_run_dir(tmp_path) as lock, Guard(lock) as guard:
        process = child(tmp_path, "import time; time.sleep(0.5)")
        guard.add(process.pid)
    assert not group_members(process.pid)
    assert process.wait(30) and process.poll() == 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize("place", ["/proc/nothing", "file"])
def test_run_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir=.*cannot be made") as raised:
        job.run(config_of(tmp_path / place))
    assert str(tmp_path / place) in str(raised.value)


def test_run_directory_in_use(tmp_path: Path) -> None:
    """By another process, as it is in life: a lock of one's own process would prove less."""
    hold = (
        "import sys\nfrom pathlib import Path\nfrom megarl.launch.supervisor import own_run_dir\n"
        f"with own_run_dir(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError) as raised:
            job.run(config_of(tmp_path))
        for word in (str(tmp_path), "in use", str(holder.pid), "run.name"):
            assert word in str(raised.value)
        holder.stdin.close()
        holder.wait(30)
    with own_run_dir(tmp_path):  # free again
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert [next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
