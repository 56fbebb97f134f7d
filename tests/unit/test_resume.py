"""A run directory that is not new: what may be made again, what a run keeps, and what a resumed job drops."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarl.buffer.store import Store
from megarl.config import save_resolved
from megarl.config.load import check_setting
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError
from megarl.core.metrics import MetricWriter
from megarl.core.schema import Task, WeightsVersion
from megarl.run.checks.tasksets import Selected
from megarl.run.launch import job
from megarl.run.run_dir.changes import FREE, changes, is_in, listed
from megarl.run.run_dir.prepare import prepare_data, prepare_model
from megarl.run.run_dir.resume import check_settings_of_run, is_finished
from megarl.tasks import read_rows, write_rows
from megarl.weights.checkpoint.training.manifest import LATEST, fingerprints, write_manifest
from tests.unit.small_job import config_of


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished_checkpoint(run_dir: Path, step: int = 2) -> Path:
    """One that counts, in a run's directory: dist_checkpointing's format around one tensor."""
    checkpoint = run_dir / "checkpoints" / f"global_step_{step}"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weight": torch.arange(3.0)}, storage_writer=dcp.FileSystemWriter(checkpoint / "actor"), no_dist=True)
    (checkpoint / "actor" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch.save({}, checkpoint / "actor" / "common.pt")
    list_files(checkpoint, step)
    write_text(checkpoint.with_name(LATEST), str(step))
    return checkpoint


def list_files(checkpoint: Path, step: int) -> None:
    files = fingerprints(
        checkpoint, [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "state.json"]
    )
    write_manifest(checkpoint, {"phase": "rl", "step": step}, {}, files)


# ---------------------------------------------------------------- tasks and model made with other settings


@pytest.fixture
def run_dir(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "run"))


@pytest.mark.parametrize(
    "override",
    [
        "taskset.train_size=20",
        "taskset.eval_size=5",
        "taskset.seed=8",
        "taskset.options.max_digits=3",
        "taskset.generate=basic_arithmetic",
    ],
)
def test_tasks_are_made_anew_when_a_setting_changes(run_dir: Path, override: str) -> None:
    before = contents(run_dir / "data")
    config = config_of(run_dir, override)
    prepare_data(config)
    after = contents(run_dir / "data")
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)
    assert len(read_rows(run_dir / "data" / "train.parquet")) == config.taskset.train_size
    prepare_data(config)
    assert contents(run_dir / "data") == after


@pytest.mark.usefixtures("soon_dry")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("taskset.generate=foo", ["taskset.generate='foo'"]),
        ("++taskset.options.foo=3", ["taskset.options.foo"]),
        ("taskset.options.slip_percent=170", ["taskset.options.slip_percent=170", "at most 100"]),
        ("taskset.eval_size=9000", ["taskset.eval_size=9000", "distinct questions"]),
    ],
)
def test_settings_that_cannot_be_made_are_refused_though_files_exist(
    run_dir: Path, override: str, words: list[str]
) -> None:
    before = contents(run_dir)
    with pytest.raises(ValueError) as raised:
        prepare_data(config_of(run_dir, override))
    for word in words:
        assert word in str(raised.value)
    assert contents(run_dir) == before


def test_tasks_of_a_run_with_checkpoints_stay(run_dir: Path) -> None:
    finished_checkpoint(run_dir)
    before = contents(run_dir)
    with pytest.raises(ConfigError, match=r"taskset\.train_size was 30, now 20.*run\.name"):
        prepare_data(config_of(run_dir, "taskset.train_size=20"))
    assert contents(run_dir) == before


def test_tasks_outside_the_run_stay(prepared: Path, tmp_path: Path) -> None:
    elsewhere = [f"taskset.{split}={prepared}/data/{split}.parquet" for split in ("train", "eval", "warm_start")]
    before = contents(prepared)
    with pytest.raises(ConfigError, match=r"taskset\.train_size was 30, now 20.*other runs may use it"):
        prepare_data(config_of(tmp_path, *elsewhere, "taskset.train_size=20"))
    assert contents(prepared) == before


def test_a_model_outside_the_run_stays_and_the_fix_is_to_use_it(prepared: Path, tmp_path: Path) -> None:
    """As where experiment=own was forgotten: the settings would make a model, and there is one of the user's."""
    mine = [f"taskset.{split}={prepared}/data/{split}.parquet" for split in ("train", "eval", "warm_start")]
    before = contents(prepared / "model")
    with pytest.raises(
        ConfigError, match=r"Set model\.from_scratch=null to use it as it is \(experiment=own"
    ) as raised:
        prepare_model(
            config_of(tmp_path, *mine, f"model.path={prepared}/model", "model.from_scratch.num_hidden_layers=2")
        )
    assert "Remove" not in str(raised.value) and contents(prepared / "model") == before


def test_no_model_is_made_at_a_mistyped_path(tmp_path: Path) -> None:
    path = tmp_path / "models" / "mien"
    with pytest.raises(ConfigError, match=r"mien does not exist, and is outside run\.dir=.*correct the path"):
        prepare_model(config_of(tmp_path / "run", f"model.path={path}"))
    assert not path.parent.exists()


def test_rows_of_ones_own_stay(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run_dir / "data" / "train.parquet"
    write_rows(path, read_rows(path)[:7])
    with caplog.at_level(logging.INFO):
        prepare_data(config_of(run_dir), verbose=True)
    assert len(read_rows(path)) == 7
    assert f"train: 7 rows in {path} (kept, a file of your own)" in caplog.text
    assert "eval.parquet (kept)" in caplog.text


@pytest.mark.parametrize("override", ["model.from_scratch.hidden_size=64", "trainer.seed=2"])
def test_model_is_made_anew_when_a_setting_changes(run_dir: Path, override: str) -> None:
    before = contents(run_dir / "model")
    config = config_of(run_dir, override)
    prepare_model(config)
    after = contents(run_dir / "model")
    assert after["model.safetensors"] != before["model.safetensors"]
    prepare_model(config)
    assert contents(run_dir / "model") == after
    assert sorted(path.name for path in run_dir.iterdir()) == ["data", "model"]


@pytest.mark.parametrize("mine", ["notes.txt", "adapter/weights.bin"])
def test_a_model_folder_with_other_files_is_not_made_anew(run_dir: Path, mine: str) -> None:
    path = run_dir / "model" / mine
    path.parent.mkdir(exist_ok=True)
    path.write_text("keep me")
    before = contents(run_dir)
    with pytest.raises(
        ConfigError, match=rf"model\.path=.*model has {mine.split('/')[0]}, which was not made with it; move it away"
    ):
        prepare_model(config_of(run_dir, "trainer.seed=2"))
    assert contents(run_dir) == before


# ---------------------------------------------------------------- the settings of a run


def begun(run_dir: Path, *, steps: int = 2, finished: bool) -> None:
    """A run of the small quickstart, as far as the settings' check looks."""
    config = config_of(run_dir, f"trainer.steps={steps}")
    save_resolved(config, run_dir / "resolved.json")
    finished_checkpoint(run_dir, steps)
    if finished:
        (run_dir / "hf").mkdir()
        (run_dir / "hf" / "config.json").write_text("{}")
        store = Store(config.store.url)
        store.journal.close_job()
        store.close()


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("model.from_scratch.num_hidden_layers=2", "model.from_scratch.num_hidden_layers was 4, now 2"),
        ("taskset.seed=8", "taskset.seed was 7, now 8"),
        ("algorithm.name=ppo", "algorithm.name was grpo, now ppo"),  # its checkpoints hold no critic
        ("algorithm.name=dpo", "algorithm.name was grpo, now dpo"),
        ("algorithm.name=reward_model", "algorithm.name was grpo, now reward_model"),
        ("reference.refresh=5", "reference.refresh was never, now 5"),
    ],
)
def test_a_run_keeps_model_and_tasks(tmp_path: Path, override: str, changed: str) -> None:
    begun(tmp_path, finished=False)
    with pytest.raises(ConfigError) as raised:
        job.run(config_of(tmp_path, override))
    for word in (str(tmp_path), changed, "run.name"):
        assert word in str(raised.value)
    assert not (tmp_path / "logs").exists()


def test_a_finished_run_of_other_settings_is_not_passed_off_as_theirs(tmp_path: Path) -> None:
    begun(tmp_path, finished=True)
    check_settings_of_run(config_of(tmp_path, "trainer.steps=2", "run.port=5000", "run.name=another"), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(
        ConfigError, match=r"finished run .*parallel\.tp was 2, now 1, parallel\.pp was 1, now 2.*run\.name"
    ):
        check_settings_of_run(config_of(tmp_path, "trainer.steps=2", "parallel=pp2"), tmp_path)
    assert contents(tmp_path) == before, "a dry run checks this too"


def test_a_finished_run_whose_server_is_not_up_is_asked_later(tmp_path: Path) -> None:
    """A server of the job's own (``job://postgres``) is started by the job, which then asks again."""
    begun(tmp_path, finished=True)
    assert is_finished(config_of(tmp_path, "trainer.steps=2"), tmp_path)
    config = config_of(tmp_path, "trainer.steps=2", "store=postgres")
    assert not is_finished(config, tmp_path)
    check_settings_of_run(config, tmp_path)


def test_a_run_that_was_finished_on_fewer_nodes_is_the_same_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last attempt had smaller sizes (``cluster.shrink``); who repeats the command has not asked for another
    run."""
    begun(tmp_path, finished=True)
    whole = config_of(tmp_path, "trainer.steps=2", "parallel.dp=2", "rollout.replicas=2")
    check_settings_of_run(whole, tmp_path)
    assert "goes on with other settings: parallel.dp was 1, now 2, rollout.replicas was 1, now 2" in caplog.text
    with pytest.raises(ConfigError, match="finished run"):
        check_settings_of_run(config_of(tmp_path, "trainer.steps=2", "parallel.dp=2", "algorithm.kl.coef=0"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "kept"), [((), True), (("parallel=pp2",), True), (("rollout.temperature=0.5",), False)]
)
def test_groups_that_were_asked_for_ahead_with_other_settings_are_asked_for_again(
    tmp_path: Path, overrides: tuple[str, ...], kept: bool
) -> None:
    """Their tokens were sampled, or judged, as the settings do not say any more."""
    before = ("sync.max_staleness=1", "trainer.steps=9")
    config = config_of(tmp_path, *before)
    job.fill_store(config, {}, 1, config)
    save_resolved(config, tmp_path / "resolved.json")
    store = Store(config.store.url, attempt=1)
    task = Task("t", "math", ({"role": "user", "content": "1 + 1 ="},), "math", {"ground_truth": "2"})
    store.tasks.add("train", [task])
    store.pacing.record_version(WeightsVersion(1, 2), 1)
    store.rollouts.request("ahead", "train", 2, WeightsVersion(1, 2), ["t"], 2, {"temperature": 1.0})
    for step in (1, 2):
        store.journal.record_step(step, {})
    finished_checkpoint(tmp_path, 2)
    changed = config_of(tmp_path, *before, *overrides)
    job.fill_store(changed, {}, 2, changed)
    assert store.rollouts.progress("ahead") == (0, int(kept))
    store.close()


def row(number: int, answer: str) -> Task:
    prompt = ({"role": "user", "content": f"{number} + 1 ="},)
    return Task(f"train/{number}", "math", prompt, "math", {"ground_truth": answer}, {"numbers": (number, 1)})


ROWS = [row(number, str(number + 1)) for number in range(3)]


@pytest.mark.parametrize("saved", [True, False])
def test_rows_that_responses_are_to_must_not_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    """Row 1 has a response of step 1. Without a checkpoint that is forgotten."""
    config = config_of(tmp_path, "trainer.steps=9")
    job.fill_store(config, {"train": Selected(ROWS, {})}, 1, config)
    save_resolved(config, tmp_path / "resolved.json")
    store = Store(config.store.url, attempt=1)
    store.pacing.record_version(WeightsVersion(1, 0), 0)
    store.rollouts.request("r", "train", 0, WeightsVersion(1, 0), ["train/0"], 1, {"temperature": 1.0})
    store.journal.record_step(1, {})
    if saved:
        finished_checkpoint(tmp_path, 1)
    further = Selected([ROWS[0], row(1, "3"), *ROWS[2:], row(3, "4")], {})
    job.fill_store(config, {"train": further}, 2, config)
    assert [task.task_id for task in store.tasks.read("train")] == [f"train/{number}" for number in range(4)]
    assert (
        "1 rows that the run has not used yet have changed or disappeared since its last start; the first is"
        in caplog.text
    )
    for attempt, others in enumerate(([row(0, "7"), *ROWS[1:]], ROWS[1:]), 3):
        if saved:
            with pytest.raises(ConfigError, match=r"responses to 1 rows that have changed .*row 1 \(taskset.train\)"):
                job.fill_store(config, {"train": Selected(others, {})}, attempt, config)
            assert store.selection.tasks_named(["train/0"])["train/0"].ground_truth == "1"
        else:
            job.fill_store(config, {"train": Selected(others, {})}, attempt, config)
    store.close()


@pytest.mark.parametrize(("saved", "lost"), [(2, [1]), (1, [])])
def test_an_evaluation_whose_weights_are_gone_is_said_not_to_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: int, lost: list[int]
) -> None:
    """Killed with the evaluation of step 1 open (trainer.eval_engines); from step 1 on it would be made again."""
    config = config_of(tmp_path, "trainer.steps=9")
    job.fill_store(config, {}, 1, config)
    store = Store(config.store.url, attempt=1)
    store.tasks.add("eval", [Task("t", "math", ({"role": "user", "content": "1 + 1 ="},), "math", {})])
    store.pacing.record_version(WeightsVersion(1, 2), 1)
    store.rollouts.request("eval-1", "eval", 1, WeightsVersion(1, 2), ["t"], 1, {})
    for step in range(1, saved + 1):
        store.journal.record_step(step, {})
    finished_checkpoint(tmp_path, saved)
    job.fill_store(config, {}, 2, config)
    assert [event["data"]["step"] for event in store.journal.events("evaluation_lost")] == lost
    assert ("evaluation of step 1 was under way" in caplog.text) is bool(lost)
    assert store.evaluations.uncounted() == {} and not store.rollouts.is_requested("eval-1")
    store.close()


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_goes_on_names_what_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: bool
) -> None:
    begun(tmp_path, finished=finished)
    check_settings_of_run(
        config_of(tmp_path, "trainer.steps=9", "algorithm.kl.coef=0", "run.allow_changes=[algorithm.kl]"), tmp_path
    )
    assert "algorithm.kl.coef was 0.2, now 0.0, trainer.steps was 2, now 9" in caplog.text


MANY = [
    *(f"algorithm.{name}=0.5" for name in ("clip_low", "clip_high", "entropy_coef", "kl.coef", "kl.target")),
    *(f"trainer.optimizer.{name}=0.5" for name in ("beta1", "beta2", "weight_decay", "clip_grad")),
]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.optimizer.lr=1e-6"], ["trainer.optimizer.lr was 5e-05, now 1e-06"]),
        (["trainer.steps=9", "reward.weight=2"], ["reward.weight was 1.0, now 2.0"]),
        (
            ["algorithm.dynamic_sampling=true", "rollout.temperature=0.5"],
            ["algorithm.dynamic_sampling was False, now True", "rollout.temperature was 1.0"],
        ),
        (["trainer.seed=2"], ["trainer.seed was 1, now 2"]),
        (
            ["reward.timeout_s=9", "reward.retries=3", "reward.max_kills=9", "reward.judge.timeout_s=9"],
            ["reward.timeout_s was 10.0, now 9.0", "reward.max_kills"],
        ),
        (["reward.judge.url=http://h:1/v1"], ["reward.judge.url was None, now http://h:1/v1"]),
        (["reference.dtype=bfloat16"], ["reference.dtype was None, now bfloat16"]),
        (MANY, [name.partition("=")[0] for name in MANY]),
    ],
)
def test_what_changes_the_training_is_confirmed(tmp_path: Path, overrides: list[str], told: list[str]) -> None:
    """The error names every such setting, and the override that lets exactly those pass."""
    begun(tmp_path, finished=False)
    with pytest.raises(ConfigError) as raised:
        check_settings_of_run(config_of(tmp_path, *overrides), tmp_path)
    for word in told:
        assert word in str(raised.value)
    [allowed] = re.findall(r"run\.allow_changes=\[\S*\]", str(raised.value))
    assert "trainer.steps" not in allowed
    check_settings_of_run(config_of(tmp_path, *overrides, allowed), tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.warm_start\.batch_size was 128, now 3"):
        check_settings_of_run(config_of(tmp_path, *overrides, allowed, "trainer.warm_start.batch_size=3"), tmp_path)


def test_a_run_that_trained_no_step_takes_corrected_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = "trainer.warm_start.steps=0"
    save_resolved(config_of(tmp_path, given), tmp_path / "resolved.json")
    finished_checkpoint(tmp_path, 0)
    check_settings_of_run(config_of(tmp_path, given, "trainer.optimizer.lr=1e-6"), tmp_path)
    assert "goes on with other settings: trainer.optimizer.lr was" in caplog.text
    with pytest.raises(ConfigError, match=r"taskset\.seed was 7, now 8.*it has trained no step, so nothing is lost"):
        check_settings_of_run(config_of(tmp_path, given, "taskset.seed=8"), tmp_path)
    save_resolved(config_of(tmp_path), tmp_path / "resolved.json")  # with a warm start, whose weights count
    with pytest.raises(ConfigError, match="trained with other settings: trainer.optimizer.lr"):
        check_settings_of_run(config_of(tmp_path, "trainer.optimizer.lr=1e-6"), tmp_path)


def test_a_judge_may_move_to_another_address(tmp_path: Path) -> None:
    begun(tmp_path, finished=False)
    save_resolved(config_of(tmp_path, "reward.judge.url=http://a:1/v1"), tmp_path / "resolved.json")
    check_settings_of_run(
        config_of(tmp_path, "reward.judge.url=http://b:2/v1", "reward.code.python=/other/python"), tmp_path
    )
    for overrides, now in ([], "None"), (["reward.judge.url=rollout"], "rollout"):
        with pytest.raises(ConfigError, match=rf"reward\.judge\.url was http://a:1/v1, now {now}"):
            check_settings_of_run(config_of(tmp_path, *overrides), tmp_path)


def test_staleness_is_no_free_setting() -> None:
    assert is_in("sync.timeout_s", FREE) and not is_in("sync.max_staleness", FREE)


def test_a_group_confirms_what_is_in_it_and_a_part_of_a_name_does_not(tmp_path: Path) -> None:
    begun(tmp_path, finished=False)
    check_settings_of_run(
        config_of(tmp_path, "trainer.optimizer.lr=1e-6", "run.allow_changes=[trainer.optimizer]"), tmp_path
    )
    with pytest.raises(ConfigError, match=r"run\.allow_changes=\[algorithm\.clip_high,trainer\.optimizer\.lr\]"):
        config = config_of(
            tmp_path, "trainer.optimizer.lr=1e-6", "algorithm.clip_high=0.3", "run.allow_changes=[trainer.optimizer]"
        )
        check_settings_of_run(config, tmp_path)
    with pytest.raises(
        ConfigError, match=r"unknown setting 'trainer\.opt' in run\.allow_changes; did you mean 'trainer\.optimizer'"
    ):
        config_of(tmp_path, "run.allow_changes=[trainer.opt]")


def test_what_a_run_keeps_cannot_be_confirmed(tmp_path: Path) -> None:
    begun(tmp_path, finished=False)
    with pytest.raises(ConfigError, match=r"taskset\.seed was 7, now 8; take another run\.name"):
        check_settings_of_run(config_of(tmp_path, "taskset.seed=8", "run.allow_changes=[taskset]"), tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "parallel=pp2",
        "trainer.steps=50",
        "rollout.replicas=3",
        "trainer.checkpoint_interval=7",
        "trainer.eval_interval=3",
        "cluster.stall_s=9",
        "store.outage_s=9",
        "run.shutdown_grace_s=9",
        "sync.timeout_s=9",
        "trainer.trackers=[]",
        "reward.workers=3",
        "reward.backlog=9",
        "critic.parallel.pp=2",
        "trainer.max_tokens_per_micro_batch=512",
        "trainer.keep_checkpoints=5",
    ],
)
def test_what_changes_nothing_of_the_training_needs_no_word(tmp_path: Path, override: str) -> None:
    begun(tmp_path, finished=False)
    check_settings_of_run(config_of(tmp_path, override), tmp_path)


def test_a_changed_url_is_named_without_its_password() -> None:
    old, new = "postgresql://me:old@db/megarl", "postgresql://db/megarl?user=me&password=new"
    assert listed(changes({"store": {"url": old}}, {"store": {"url": new}})) == [
        "store.url was postgresql://me:***@db/megarl, now postgresql://db/megarl?user=me&password=***"
    ]


def test_settings_that_may_change_are_settings() -> None:
    for name in FREE:
        check_setting(name)


@pytest.mark.parametrize("text", ["", "[]", '{"trainer": {"stepz": 3}}', "\ufffd"])
def test_damaged_settings_of_a_run_are_named(tmp_path: Path, text: str) -> None:
    begun(tmp_path, finished=False)
    (tmp_path / "resolved.json").write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path}/resolved.json .*remove it"):
        check_settings_of_run(config_of(tmp_path), tmp_path)


# ---------------------------------------------------------------- what an attempt wrote after its last checkpoint


def test_evaluations_of_later_steps_are_forgotten(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    for step in (0, 20, 40):
        store.rollouts.request(f"eval-{step}", "eval", step, WeightsVersion(1, step), [], 1, {})
        store.journal.record_event(
            "trainer", "evaluation", {"rollout_id": f"eval-{step}", "step": step, "accuracy": 0.5}
        )
    store.journal.record_event("explorer", "engine_retry", {"error": "x"})
    store.rollouts.discard(20)
    assert [event["data"]["step"] for event in store.journal.events("evaluation")] == [0, 20]
    assert len(store.journal.events("engine_retry")) == 1
    store.close()


def test_metrics_of_later_steps_are_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps(folder: Path, tag: str) -> list[int]:
        return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]

    first = MetricWriter(tmp_path)
    for step in range(1, 6):
        first.write(step, {"sft/loss": 1.0})
    for step in range(4):
        first.write(step, {"actor/loss": 2.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "act')
    resumed = MetricWriter(tmp_path, warm_start_step=5, step=2)
    resumed.write(3, {"actor/loss": 3.0})
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == [1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert lines[-1]["actor/loss"] == 3.0
    assert steps(tmp_path / "tensorboard", "actor/loss") == [0, 1, 2, 3]
    assert steps(tmp_path / "tensorboard" / "warm_start", "sft/loss") == [1, 2, 3, 4, 5]
