"""The command line without the heavy packages: help, wrong input, exit statuses."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import COMMANDS, build_parser, main, parse_arguments
from megarl.core.errors import ConfigError, DataError, NonRetryableError, SandboxError

HEAVY = ("torch", "vllm", "megatron", "transformers", "transformer_engine", "apex", "triton")
ROOT = str(Path(__file__).resolve().parents[2])


def megarl(*arguments: str, blocked: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter in which importing any of ``blocked`` fails."""
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from megarl.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_blocking_works() -> None:
    """Else the tests below prove nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; import torch"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "torch" in done.stderr


def test_help_names_every_command() -> None:
    done = megarl("--help")
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s", done.stdout, re.MULTILINE), f"{command} is not in\n{done.stdout}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_needs_no_heavy_package(command: str) -> None:
    done = megarl(command, "--help")
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


def test_help_imports_nothing_but_the_standard_library() -> None:
    """What makes it answer at once; the time itself is nothing that a test could pin."""
    code = (
        "import sys\nfrom megarl.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {ROOT!r})\n{code}"],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.split()) <= {"megarl", "__main__"}


def test_every_command_of_the_parser_has_a_function() -> None:
    actions = next(a for a in build_parser()._actions if a.dest == "command")
    assert set(actions.choices or ()) == set(COMMANDS)


def test_config_prints_what_overrides_compose_to() -> None:
    done = megarl("config", "experiment=quickstart", "trainer.steps=7", "parallel=pp2")
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)
    assert settings["trainer"]["steps"] == 7
    assert (settings["parallel"]["tp"], settings["parallel"]["pp"]) == (1, 2)


@pytest.mark.parametrize("experiment", ["quickstart", "ppo_llama3_1_8b", "dpo", "grpo_deepseek_v3"])
def test_changed_settings_make_the_job_again(experiment: str) -> None:
    """Beside defaults alone."""
    from megarl.config import Config, compose, from_dict
    from megarl.config.settings_page import changed

    config = compose([f"experiment={experiment}"])
    tree: dict[str, Any] = {}
    for name, value in changed(config):
        *groups, last = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
        inner[last] = value
    assert from_dict(Config, tree) == config
    assert "trainer.optimizer.eps" not in dict(changed(config))


def test_overrides_may_stand_behind_an_option() -> None:
    found = parse_arguments(["train", "experiment=quickstart", "--check", "algorithm=ppo", "~reward"])
    assert found.check and found.overrides == ["experiment=quickstart", "algorithm=ppo", "~reward"]
    for wrong in (["train", "--chek", "a=1"], ["doctor", "a=1"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)


def test_a_users_mistake_is_one_line_and_status_2() -> None:
    done = megarl("config", "experiment=quickstart", "trainer.stepz=3")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("megarl config: unknown setting 'trainer.stepz'")
    assert "did you mean 'trainer.steps'?" in done.stderr


class _OfAnotherModule(ConfigError):
    """A ConfigError that is not defined in ``megarl.core.errors``."""


@pytest.mark.parametrize(
    "error, status",
    [(DataError, 2), (_OfAnotherModule, 2), (NonRetryableError, 1), (ValueError, None), (SandboxError, None)],
)
def test_status_of_an_error(monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int | None) -> None:
    """2 for invalid input, 1 for a failed job; anything else keeps its traceback."""

    def command(arguments: argparse.Namespace) -> int:
        raise error("text")

    monkeypatch.setitem(COMMANDS, "doctor", command)
    if status is not None:
        assert main(["doctor"]) == status
        return
    with pytest.raises(error, match="text"):
        main(["doctor"])


@pytest.mark.parametrize("option", [["--nodes", "2"], ["--gpus-per-node", "8"], ["--check", "-m", "--nodes", "2"]])
def test_machines_that_are_not_there_are_for_a_check_alone(option: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", "experiment=quickstart", *option]) == 2
    assert "--nodes and --gpus-per-node" in caplog.text


@pytest.mark.parametrize("option", [[], ["--check"], ["-m"]])
def test_rows_of_ones_own_need_an_experiment(option: list[str]) -> None:
    """The quickstart's learning rate, warm start and eight tokens of a response would hold without a word."""
    words = ["train", *option, "taskset.train=a.parquet", "taskset.eval=b.parquet"]
    with pytest.raises(ConfigError, match=r"taskset\.train=a\.parquet without an experiment.*add experiment=own"):
        COMMANDS["train"](parse_arguments(words))
    if not option:
        with pytest.raises(ConfigError, match="model.path"):
            COMMANDS["train"](parse_arguments([*words, "experiment=own"]))


def test_without_a_command_it_says_so() -> None:
    done = megarl()
    assert done.returncode == 2
    assert "required: command" in done.stderr


def test_version() -> None:
    done = megarl("--version")
    assert done.returncode == 0 and re.fullmatch(r"megarl \d+\.\d+\.\d+\n", done.stdout)


INTERRUPTED = """
import os, signal, sys
import megarl.cli as cli
def command(arguments):
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException:
        {reaction}
    return 0
cli.COMMANDS["doctor"] = command
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.parametrize("reaction", ["raise", "raise ModuleNotFoundError('Could not import module')", "pass"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupt_is_one_line_and_status_130(name: str, reaction: str) -> None:
    """Also where an import that it hits swallows it or raises another error in its place; Slurm's, too, before a job
    has processes."""
    code = INTERRUPTED.format(name=name, reaction=reaction)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "megarl doctor: interrupted\n"


def test_path_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what the command needs; its logging is as in a process of its own."""
    (tmp_path / "file").write_text("")
    for name, value in (("handlers", []), ("level", logging.WARNING)):
        monkeypatch.setattr(logging.root, name, value)
    assert main(["data", f"run.dir={tmp_path}/file/x"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("megarl data: ") and "Traceback" not in said
    assert f"{tmp_path}/file/x" in said
