"""Models named as on the Hugging Face hub: taken from the local cache, never downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.config import compose, save_resolved
from megarl.core.errors import CheckpointError, ConfigError
from megarl.run.checks.job import check
from megarl.run.run_dir.resume import check_settings_of_run
from tests.unit.small_job import config_of, refused

NAME = "Some-Org/Tiny-0.5B"
OWN = ["experiment=own", "taskset.train=a.parquet", "taskset.eval=b.parquet"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an empty folder to work in."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hf" / "hub"


def cached(hub: Path, model: Path | None = None) -> Path:
    """A snapshot as huggingface_hub lays it out."""
    folder = hub / "models--Some-Org--Tiny-0.5B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    found = folder / "snapshots" / "abc123"
    if model is None:
        found.mkdir(parents=True)
        (found / "config.json").write_text("{}")
    else:
        shutil.copytree(model, found)
    return found


def test_a_cached_name_is_the_path_of_its_snapshot(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose([*OWN, f"model.path={NAME}"]).model.path == NAME
    found = cached(hub)
    config = compose(
        [*OWN, f"model.path={NAME}", f"critic.path={NAME}", f"reward_model.path={NAME}", f"teachers.t.path={NAME}"]
    )
    paths = {config.model.path, config.critic.path, config.reward_model.path, config.teachers["t"].path}
    assert paths == {str(found)}
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.parent / "elsewhere"))
    assert compose([*OWN, f"model.path={NAME}"]).model.path == NAME
    shutil.move(hub, hub.parent / "elsewhere")
    assert compose([*OWN, f"model.path={NAME}"]).model.path == str(hub.parent / "elsewhere" / found.relative_to(hub))


def test_a_folder_here_comes_first(hub: Path) -> None:
    cached(hub)
    Path(NAME).mkdir(parents=True)
    assert compose([*OWN, f"model.path={NAME}"]).model.path == NAME


def test_a_job_takes_the_snapshot(hub: Path, prepared: Path) -> None:
    cached(hub, prepared / "model")
    assert check(config_of(prepared, f"model.path={NAME}")).keys() == {"train", "eval"}


def test_a_name_that_is_not_cached_says_how_to_get_it(hub: Path, prepared: Path) -> None:
    """Also where the experiment describes a model from scratch: it would be made under that name."""
    words = [
        f"model.path={NAME}",
        "nothing is downloaded",
        f"`hf download {NAME} --local-dir models/Tiny-0.5B`",
        "huggingface-cli",
        str(hub),
    ]
    refused(ConfigError, config_of(prepared, f"model.path={NAME}", "model.from_scratch=null"), *words)
    refused(ConfigError, config_of(prepared, f"model.path={NAME}"), *words)
    assert not Path("Some-Org").exists()
    refused(
        CheckpointError,
        config_of(prepared, "algorithm=ppo", f"critic.path={NAME}"),
        f"hf download {NAME}",
        "critic.path=models/Tiny-0.5B",
    )


def test_a_run_keeps_the_snapshot_that_it_began_with(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The branch may move on in the cache; without the old snapshot the new one is another model, which the run
    refuses."""
    first = cached(hub)
    words = [
        *OWN,
        f"model.path={NAME}",
        f"critic.path={NAME}",
        f"teachers.t.path={NAME}",
        f"run.dir={tmp_path / 'run'}",
    ]
    (tmp_path / "run").mkdir()
    save_resolved(compose(words), tmp_path / "run" / "resolved.json")
    second = first.with_name("def456")
    shutil.copytree(first, second)
    (hub / "models--Some-Org--Tiny-0.5B" / "refs" / "main").write_text("def456")
    config = compose(words)
    assert {config.model.path, config.critic.path, config.teachers["t"].path} == {str(first)}
    assert f"the run keeps {first}, although the cache's main branch is at def456" in caplog.text
    assert compose([*words[:-1], f"run.dir={tmp_path / 'other'}"]).model.path == str(second)
    given = [f"model.path={second}" if word == f"model.path={NAME}" else word for word in words]
    assert compose(given).model.path == str(second), "a path is taken as it is"
    (hub / "models--Some-Org--Tiny-0.5B" / "refs" / "main").unlink()
    assert compose(words).model.path == str(first)


def test_a_missing_snapshot_of_a_run_is_named_with_the_way_back(hub: Path, tmp_path: Path) -> None:
    first, run_dir = cached(hub), tmp_path / "run"
    config = config_of(run_dir, f"model.path={NAME}")
    (run_dir / "checkpoints" / "step_0").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_0" / "state.json").write_text("{}")
    save_resolved(config, run_dir / "resolved.json")
    second = first.with_name("def456")
    first.rename(second)
    (hub / "models--Some-Org--Tiny-0.5B" / "refs" / "main").write_text("def456")
    words = [
        f"model.path was {first}",
        "no longer in the cache",
        f"`hf download {NAME} --revision abc123`",
        f"now {second}",
    ]
    with pytest.raises(ConfigError) as caught:
        check_settings_of_run(config_of(run_dir, f"model.path={NAME}"), run_dir)
    assert all(word in str(caught.value) for word in words)
