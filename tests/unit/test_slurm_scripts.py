"""The job scripts with stand-ins for Slurm's commands: what they submit, refuse and end with."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.run.launch.sweep import combinations

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "array_sweep.sh"
SWEEP = ["run.name=s", "trainer.seed=1,2"]

STAND_INS = {
    "sbatch": 'echo sbatch "$@"',
    "megarl": f'exec {sys.executable} -m megarl "$@"',
    "srun": 'while [ "$1" != megarl ]; do shift; done; exec "$@"',
    "scontrol": "echo node1 NodeAddr=127.0.0.1",
}


def script(
    tmp_path: Path, *arguments: str, path: Path = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script with megarl itself and stand-ins for Slurm; tests/system has a real one."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "MEGARL_"))}
    env = {**kept, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        ["bash", str(path), *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def test_the_script_counts_and_submits_itself(tmp_path: Path) -> None:
    done = script(tmp_path, *SWEEP, PARALLEL="2", SBATCH_ARGS="--time=1:00 --gpus=8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sbatch", "--array=0-1%2", "--time=1:00", "--gpus=8", str(SCRIPT), *SWEEP]


def test_the_script_submits_nothing_when_a_combination_is_wrong(tmp_path: Path) -> None:
    done = script(tmp_path, *SWEEP, "trainer.steps=1,x")
    assert done.returncode == 2 and done.stdout == ""
    assert "trainer.steps='x' must be of type int" in done.stderr


def job(tmp_path: Path, *, nodes: int = 1, cpus: str = "8") -> dict[str, str]:
    """Environment of a job of Slurm, whose runs are in ``tmp_path``."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "MEGARL_HOME": str(ROOT),
        "MEGARL_SETUP": "none",
    }


def test_a_task_of_the_array_runs_its_own_combination(tmp_path: Path) -> None:
    done = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **job(tmp_path), SLURM_ARRAY_TASK_ID="9")
    assert done.returncode == 2 and "--index 9: the combinations are 0 to 1" in done.stderr


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisors are not started; what would start them is printed."""
    monkeypatch.setitem(STAND_INS, "srun", 'echo srun "$@"')


@pytest.mark.usefixtures("shown")
def test_a_sweep_on_several_nodes_has_a_store_that_they_can_share(tmp_path: Path) -> None:
    """SQLite is refused there."""
    where = f"run.dir={tmp_path}/runs"
    one, two = (script(tmp_path, *SWEEP, where, **job(tmp_path, nodes=nodes)).stdout.split() for nodes in (1, 2))
    assert "store=postgres" not in one and two[-1] == "store=postgres"
    given = script(tmp_path, *SWEEP, where, "store=sqlite", **job(tmp_path, nodes=2)).stdout.split()
    assert "store=sqlite" in given and "store=postgres" not in given


@pytest.mark.usefixtures("shown")
def test_a_supervisor_is_not_bound_to_the_cpus_of_one_task(tmp_path: Path) -> None:
    assert "--cpu-bind=none" in script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **job(tmp_path)).stdout


@pytest.mark.parametrize("name", ["train_grpo.sh", "train_ppo.sh", "train_mix.sh", "train_dpo.sh"])
def test_a_job_takes_one_node_unless_it_asks_for_more(name: str) -> None:
    assert "#SBATCH --nodes=1" in (ROOT / "slurm" / name).read_text().splitlines()


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_ask_for_whole_nodes(path: Path) -> None:
    """Without that Slurm gives one core a node."""
    lines = path.read_text().splitlines()
    components = lines.count("#SBATCH --ntasks-per-node=1")
    assert path.name == "common.sh" or components >= 1
    assert lines.count("#SBATCH --exclusive") == lines.count("#SBATCH --mem=0") == components


@pytest.mark.parametrize(
    ("cpus", "environment", "words"),
    [
        ("1", {}, "a node of this job has 1 CPUs (SLURM_JOB_CPUS_PER_NODE=1), megarl needs 2"),
        ("8(x2),1", {}, "(SLURM_JOB_CPUS_PER_NODE=8(x2),1)"),
        ("8", {"SLURM_GPUS_ON_NODE": "8"}, "megarl needs 16"),
        ("8", {"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "1"}, "(SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1=1)"),
        ("8", {"MEGARL_CPUS": "9"}, "megarl needs 9: submit with --exclusive or --cpus-per-task=9"),
    ],
)
@pytest.mark.usefixtures("shown")
def test_a_job_with_too_few_cpus_is_refused(tmp_path: Path, cpus: str, environment: dict[str, str], words: str) -> None:
    done = script(tmp_path, *SWEEP, **job(tmp_path, cpus=cpus), **environment)
    assert done.returncode == 2 and words in done.stderr
    assert done.stdout == "", "no supervisor was started"


@pytest.mark.usefixtures("shown")
def test_as_few_cpus_as_are_allowed(tmp_path: Path) -> None:
    settings = {**job(tmp_path, cpus="1(x3)"), "MEGARL_CPUS": "1"}
    done = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **settings)
    assert done.returncode == 0 and "srun" in done.stdout


@pytest.mark.usefixtures("shown")
def test_more_names_of_nodes_than_a_pipe_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = 'count=1; [ "$2" = hostnames ] && count=60000; for i in $(seq $count); do echo node$i NodeAddr=::1; done'
    monkeypatch.setitem(STAND_INS, "scontrol", names)
    done = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **job(tmp_path))
    assert done.returncode == 0 and "srun" in done.stdout, done.stderr


@pytest.mark.modules
@pytest.mark.usefixtures("shown")
def test_a_job_loads_modules_and_then_an_environment(tmp_path: Path) -> None:
    modules, environment = tmp_path / "modules", tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "activate").write_text("echo activated with $FIRST and $SECOND\n")
    modules.mkdir()
    for name in ("FIRST", "SECOND"):
        (modules / name.lower()).write_text(f"#%Module1.0\nsetenv {name} value-of-{name}\n")
    setup = f"module:first,second;venv:{environment}"
    settings = {**job(tmp_path), "MODULEPATH": str(modules), "MEGARL_SETUP": setup}
    done = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **settings)
    assert done.returncode == 0 and "srun" in done.stdout, done.stderr
    assert "activated with value-of-FIRST and value-of-SECOND" in done.stdout
    settings["MEGARL_SETUP"] = "module:first,third"
    done = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/runs", **settings)
    assert done.returncode == 2 and "module load third failed" in done.stderr
    assert done.stdout == "", "no supervisor was started"


@pytest.mark.parametrize("setup", ["conda:mine", "venv:/nowhere;conda:mine"])
@pytest.mark.usefixtures("shown")
def test_an_unknown_setup_is_refused(tmp_path: Path, setup: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    given = setup.replace("/nowhere", str(tmp_path))
    done = script(tmp_path, *SWEEP, **{**job(tmp_path), "MEGARL_SETUP": given})
    assert done.returncode == 2 and done.stderr == (
        "MEGARL_SETUP=conda:mine: give venv:PATH, module:NAMES, pyxis:IMAGE, apptainer:IMAGE or none\n"
    )


def test_the_heads_status_is_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another node was lost on the way, srun ends with that one's; without one from the head its own counts."""
    monkeypatch.setitem(
        STAND_INS, "srun", 'while [ "$1" != megarl ]; do shift; done; SLURM_PROCID=$RANK "$@"; exit 137'
    )
    (runs := tmp_path / "runs").mkdir()
    (runs / ".slurm-status-7-killed").write_text("1")  # by a start of this job that was killed
    (runs / ".slurm-status-77-lives").write_text("")
    settings = {**job(tmp_path), "SLURM_ARRAY_TASK_ID": "9"}
    done = [script(tmp_path, *SWEEP, f"run.dir='{runs}'", **settings, RANK=rank) for rank in ("0", "1")]
    assert [each.returncode for each in done] == [2, 137]
    assert [path.name for path in runs.iterdir()] == [".slurm-status-77-lives"]


def test_the_heads_status_is_in_a_folder_that_containers_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's directory; the temporary folder of the node is not mounted."""
    monkeypatch.setitem(STAND_INS, "srun", 'echo "$MEGARL_STATUS"')
    (home := tmp_path / "home").mkdir()
    (home / "slurm").symlink_to(ROOT / "slurm")
    settings = {**job(tmp_path), "MEGARL_HOME": str(home)}
    assert script(tmp_path, *SWEEP, **settings).stdout.startswith(f"{home}/runs/.slurm-status-7-")
    given = script(tmp_path, *SWEEP, f"run.dir={tmp_path}/there", **settings)
    assert given.stdout.startswith(f"{tmp_path}/there/.slurm-status-7-")
    quoted = script(tmp_path, *SWEEP, f'run.dir="{tmp_path}/with space"', **settings)
    assert quoted.stdout.startswith(f"{tmp_path}/with space/.slurm-status-7-")
    for unread in ("run.dir=${oc.env:HOME}/there", "run.dir="):
        assert script(tmp_path, *SWEEP, unread, **settings).stdout.startswith(f"{home}/runs/.slurm-status-7-")
    assert sorted(path.name for path in home.iterdir()) == ["runs", "slurm"]


def test_a_stop_is_no_failure_where_the_status_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGARL_STATUS", str(tmp_path / "not mounted" / "status"))
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setitem(cli.COMMANDS, "train", lambda arguments: 130)
    assert cli.main(["train"]) == 130
    assert "takes srun's status, 130" in caplog.text


def test_the_example_of_the_array_is_a_sweep() -> None:
    """As it is printed in the script and in docs/sweeps.md."""
    for page in (SCRIPT, ROOT / "docs" / "sweeps.md"):
        (example,) = set(re.findall(r"slurm/array_sweep.sh (experiment=.*)", page.read_text()))
        assert len(combinations(shlex.split(example))) == 4


ASYNC = SCRIPT.with_name("train_async.sh")


def test_a_run_of_separate_jobs_is_submitted_as_a_whole(tmp_path: Path) -> None:
    settings = {"EXPLORE": "2", "SBATCH_ARGS": "--time=1:00", "EXPLORE_ARGS": "--nodes=2"}
    done = script(tmp_path, "experiment=quickstart", "run.name=s", path=ASYNC, **settings)
    assert done.returncode == 0, done.stderr
    jobs = [line.split() for line in done.stdout.splitlines()]
    assert [words[1] for words in jobs] == [
        f"--job-name=megarl-{name}" for name in ("store", "explore-0", "explore-1", "train")
    ]
    assert all("--time=1:00" in words and words[-2:] == ["experiment=quickstart", "run.name=s"] for words in jobs)
    assert ["--nodes=2" in words for words in jobs] == [False, True, True, False]
    assert [words[words.index("--number") + 1] for words in jobs[1:3]] == ["0", "1"]
    refused = script(tmp_path, "experiment=quickstart", path=ASYNC)
    assert refused.returncode == 2 and "give run.name or run.dir" in refused.stderr and refused.stdout == ""


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("part", ["store", "explore", "train"])
def test_each_job_of_a_run_starts_its_part(tmp_path: Path, part: str) -> None:
    where = f"run.dir={tmp_path}/runs"
    done = script(tmp_path, where, path=ASYNC, **job(tmp_path), MEGARL_PART=part)
    words = done.stdout.split()
    assert done.returncode == 0 and words[words.index("megarl") + 1] == part, done.stderr
    assert "store=postgres" in words and "run.host=127.0.0.1" in words
    assert ("run.mode=train" in words) == (part == "train")
