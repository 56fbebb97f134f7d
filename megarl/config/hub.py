"""Models named as on the Hugging Face hub: found in the local cache, never downloaded."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from megarl.config.derived import RoleConfig, sections_of, teacher_role, with_sections
from megarl.config.schema import Config, ReferenceConfig

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_name(path: str) -> bool:
    """Return True if ``path`` has the form ORGANISATION/MODEL and its parent folder does not exist; ``./a/b`` is always
    a path."""
    return bool(_NAME.fullmatch(path)) and not Path(path).parent.exists()


def cache() -> Path:
    """Return the download folder of huggingface_hub, by its environment variables."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def snapshot(path: str) -> str:
    """Return the cached snapshot of the main branch of hub name ``path``; ``path`` itself if it exists, is no hub name
    or is not cached."""
    if not _reads_as_name(path):
        return path
    try:
        revision = (_cached(path) / "refs" / "main").read_text().strip()
    except OSError:
        return path
    found = _cached(path) / "snapshots" / revision
    return str(found) if _is_whole(found) else path


def with_snapshots(config: Config) -> Config:
    """Return the settings with hub names of models replaced by cached snapshots: the run's first ones while cached."""
    used = _paths(Path(config.run.dir) / "resolved.json")
    sections: dict[str, RoleConfig] = {}
    for role, section in sections_of(config).items():
        if not isinstance(section, ReferenceConfig) and section.path is not None:
            sections[role] = replace(section, path=_snapshot_of_run(section.path, used.get(role)))
    model = replace(config.model, path=_snapshot_of_run(config.model.path, used.get("model")))
    return with_sections(replace(config, model=model), sections)


def lost(path: str) -> str | None:
    """Return the command that downloads a snapshot missing from the cache; None for other paths."""
    folder = Path(path)
    model = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not model.startswith("models--") or _is_whole(folder):
        return None
    return f"`hf download {model.removeprefix('models--').replace('--', '/', 1)} --revision {folder.name}`"


def _snapshot_of_run(path: str, used: str | None) -> str:
    """Return the snapshot of the run's last start if still cached, else the newest one; ``path`` itself if it is a
    path."""
    newest = snapshot(path)
    if used is None or used == newest or not _reads_as_name(path):
        return newest
    if Path(used).parent != _cached(path) / "snapshots" or not _is_whole(Path(used)):
        return newest
    if newest != path:
        log.warning("the run keeps %s, although the cache's main branch is at %s", used, Path(newest).name)
    return used


def _reads_as_name(path: str) -> bool:
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


def _cached(name: str) -> Path:
    return cache() / f"models--{name.replace('/', '--')}"


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _paths(resolved: Path) -> dict[str, str]:
    """Return the model paths of the run's last start; none if its settings cannot be read, which other code reports."""
    try:
        settings = json.loads(resolved.read_text())
        sections = {role: settings[role] for role in ("model", "critic", "reward_model")}
        teachers = settings.get("teachers", {})  # runs of before there were any
        sections |= {teacher_role(name): section for name, section in teachers.items()}
        return {role: str(section["path"]) for role, section in sections.items() if section["path"] is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def advice(setting: str, path: str) -> str | None:
    """Return how to get a model whose hub name was given as a path; None for other paths."""
    if not _reads_as_name(path):
        return None
    folder = f"models/{path.partition('/')[2]}"
    return (
        f"if this is a name on the Hugging Face hub, nothing is downloaded: `hf download {path} --local-dir {folder}` "
        f"(older: huggingface-cli download) and set {setting}={folder}, or `hf download {path}`, whose cache "
        f"({cache()}) is found by the name; a path here begins with ./"
    )
