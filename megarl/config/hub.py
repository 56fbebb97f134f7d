"""Models that are named as on the Hugging Face hub: found in the local cache, never downloaded."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from megarl.config.schema import Config

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_name(path: str) -> bool:
    """Whether ``path`` reads as ORGANISATION/MODEL and neither it nor a folder for it is here; ``./a/b`` is always a path."""
    return bool(_NAME.fullmatch(path)) and not Path(path).parent.exists()


def cache() -> Path:
    """The folder of huggingface_hub's downloads, by its environment variables."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def snapshot(path: str) -> str:
    """The cached snapshot of a hub name's main branch; ``path`` itself where it exists, is no such name or is not cached."""
    if not _NAME.fullmatch(path) or Path(path).exists():
        return path
    folder = cache() / f"models--{path.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return path
    found = folder / "snapshots" / revision
    return str(found) if (found / "config.json").is_file() else path


def with_snapshots(config: Config) -> Config:
    """The settings with cached snapshots for hub names of models: those that the run began with, for as long as the cache has them."""
    roles = {role: getattr(config, role) for role in ("model", "critic", "reward_model")}
    used = _paths(Path(config.run.dir) / "resolved.json")
    found = {role: _kept(used.get(role), snapshot(value.path)) for role, value in roles.items() if value.path is not None}
    return replace(config, **{role: replace(roles[role], path=path) for role, path in found.items()})


def _kept(used: str | None, newest: str) -> str:
    """The snapshot of the run's last start where the name's main branch has moved on since."""
    if used is None or used == newest or Path(used).parent != Path(newest).parent or Path(newest).parent.name != "snapshots":
        return newest
    if not (Path(used) / "config.json").is_file():
        return newest
    log.warning("the run goes on with %s, though the cache's main branch is at %s", used, Path(newest).name)
    return used


def _paths(resolved: Path) -> dict[str, str]:
    """Model paths of a run's last start; none where its settings cannot be read, of which others tell."""
    try:
        settings = json.loads(resolved.read_text())
        return {role: str(settings[role]["path"]) for role in ("model", "critic", "reward_model") if settings[role]["path"] is not None}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def advice(setting: str, path: str) -> str | None:
    """The way to get a model whose hub name was given as a path; None for other paths."""
    if not _NAME.fullmatch(path) or Path(path).exists():
        return None
    folder = f"models/{path.partition('/')[2]}"
    return (
        f"if this is a name on the Hugging Face hub, nothing is downloaded: `hf download {path} --local-dir {folder}` (older: huggingface-cli "
        f"download) and set {setting}={folder}, or `hf download {path}`, whose cache ({cache()}) is found by the name; a path here begins with ./"
    )
