"""Models of a bench: an HF checkpoint, one with an adapter, a run, or a checkpoint of a run, each as a directory that
an engine can load."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.config import hub, load_resolved
from megarl.core.durable import replace_directory
from megarl.core.errors import CheckpointError, ConfigError
from megarl.core.metrics import best_step
from megarl.core.published import MANIFEST, folder_of, whole_versions
from megarl.run.run_dir.rows import RUN
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.dist import find_dist
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.output import partial_path
from megarl.weights.checkpoint.training.manifest import PREFIX, check_finished, exported_step, finished

log = logging.getLogger(__name__)

CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONGEST = 60


@dataclass(frozen=True)
class Subject:
    """One model of a bench."""

    name: str
    """Name in the command, with the step added if it was left out."""
    path: Path
    """HF checkpoint, or training checkpoint to convert."""
    is_hf: bool
    published: str = ""
    """Manifest digest of weights that a run has published; these weights are copied, since the run removes them."""
    adapter: Path | None = None
    """PEFT folder, or a run's checkpoint with adapters, to merge into the HF checkpoint ``path``."""

    @property
    def slug(self) -> str:
        """Name of the model's directory in the bench; depends only on its path."""
        plain = re.sub(r"[^\w.@-]+", "_", self.name.removeprefix(RUN).strip("/"), flags=re.ASCII)[-LONGEST:]
        places = [self.path, *([] if self.adapter is None else [self.adapter])]
        paths = "+".join(str(place.resolve()) for place in places)
        digest = hashlib.blake2b(paths.encode(), digest_size=3).hexdigest()
        return f"{plain.lstrip('._')}-{digest}"

    def identity(self) -> str:
        """Return the digest of the names, sizes and times of its files, without reading them; or ``published``."""
        if self.published:
            return self.published
        found = _files_of(self.path)
        if self.adapter is not None:
            found += _files_of(self.adapter)
        return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()

    def hf_path(self, folder: Path) -> Path:
        """Return the model's HF checkpoint; in ``folder`` if it must be converted."""
        return self.path if self.is_hf else folder / "model"

    def convert(self, folder: Path, dtype: str = "float32") -> None:
        """Write the verified HF checkpoint of a training checkpoint or adapter, or copy published weights. An existing
        one is kept. Raises CheckpointError.

        Args:
            dtype: ``model.dtype``; the sum of model and adapter is rounded to it.
        """
        target = self.hf_path(folder)
        if self.is_hf or (target / CONFIG).is_file():
            return
        if self.published:
            self._copy(target)
            return
        from megarl.weights.checkpoint.convert.convert import Settings, convert_megatron_to_hf

        if self.adapter is not None:
            from megarl.weights.checkpoint.convert.adapters import AdapterCheckpoint, merge_adapter

            log.info("%s: merging %s and %s in %s", self.name, self.path, self.adapter, target)
            adapter = self.adapter
            if (trained := AdapterCheckpoint.of(adapter)) is not None:
                trained.write(adapter := folder / "adapter", Settings(overwrite=True, verify=True))
            settings = Settings(dtype=DTYPES[dtype], verify=True, progress=False)
            merge_adapter(self.path, adapter, target, settings)
            return
        log.info("%s: converting %s to an HF checkpoint in %s", self.name, self.path, target)
        convert_megatron_to_hf(self.path, target, settings=Settings(verify=True, progress=False))

    def _copy(self, target: Path) -> None:
        """Copy published weights, which their run may remove during the copy. Raises CheckpointError."""
        log.info("%s: copying %s to %s", self.name, self.path, target)
        part = partial_path(target)
        shutil.rmtree(part, ignore_errors=True)
        try:
            shutil.copytree(self.path, part)
        except OSError as error:  # includes shutil.Error
            raise CheckpointError(f"MODEL {self.name} cannot be copied to {target}: {error}") from error
        if not (self.path / MANIFEST).is_file():  # removed first
            raise CheckpointError(
                f"MODEL {self.name} was removed while it was copied, since the run has published newer weights; run "
                "the command again"
            )
        replace_directory(part, target)

    def clean_up(self, folder: Path) -> None:
        """Remove the files that ``convert`` has written."""
        if not self.is_hf:
            for written in (self.hf_path(folder), folder / "adapter"):
                shutil.rmtree(written, ignore_errors=True)


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and (stat := path.stat())
    )


def short_names(subjects: Sequence[Subject]) -> list[str]:
    """Return the names without the folders that all names begin with, for column heads."""
    parts = [subject.name.removeprefix(RUN).strip("/").split("/") for subject in subjects]
    shared = 0
    while (
        len(parts) > 1 and len({tuple(p[: shared + 1]) for p in parts}) == 1 and all(len(p) > shared + 1 for p in parts)
    ):
        shared += 1
    return ["/".join(p[shared:]) for p in parts]


def subject_of(word: str) -> Subject:
    """Return the model that a word of the command names: a directory, a name in the hub's cache, a PEFT folder alone or
    as ``MODEL+FOLDER``, ``run:DIR``, ``run:DIR@STEP`` or ``run:DIR@VERSION``.

    Raises ConfigError that names existing alternatives.
    """
    if word.startswith(RUN):
        return _of_run(word)
    if "+" in word and not Path(word).exists():
        return _with_adapter(word, *_both(word))
    path = Path(hub.snapshot(word))
    if peft.is_folder(path):
        try:
            return _with_adapter(word, peft.base_of(path), path)
        except CheckpointError as error:
            raise ConfigError(f"MODEL {word}: {error}, or give MODEL+{word}") from error
    if (path / "resolved.json").is_file():
        raise ConfigError(f"MODEL {word} is the directory of a run; write {RUN}{word}, or {RUN}{word}@STEP")
    if (path / CONFIG).is_file():
        return Subject(word, path, is_hf=True)
    if path.is_dir() and (model := find_dist(path)) is not None:
        check_finished(model)
        return _of_checkpoint(word, path)
    fix = (
        f"give the directory of an HF checkpoint or a PEFT adapter, {RUN}DIR of a run, or {RUN}DIR@STEP (or @best) of "
        "one of its checkpoints"
    )
    if hub.is_name(word):
        fix += f"; of a name on the Hugging Face hub, `hf download {word}` puts it where it is found by the name"
    raise ConfigError(f"MODEL {word} has no {CONFIG}; {fix}")


def _both(word: str) -> tuple[Path, Path]:
    """Split ``MODEL+ADAPTER`` into model and adapter. If names of folders have a ``+`` too, take the first split into
    existing folders."""
    parts = word.split("+")
    pairs = [("+".join(parts[:at]), "+".join(parts[at:])) for at in range(1, len(parts))]
    found = [(Path(hub.snapshot(base)), Path(adapter)) for base, adapter in pairs]
    return next((pair for pair in found if all(path.is_dir() for path in pair)), found[-1])


def _with_adapter(word: str, base: Path, adapter: Path) -> Subject:
    """Return the model ``base`` with an adapter. Raises ConfigError if one is missing, or the adapter is not for the
    model."""
    if not (base / CONFIG).is_file():
        raise ConfigError(f"MODEL {word}: {base} has no {CONFIG}; give the HF checkpoint that the adapter is for")
    try:
        peft.lora_of(adapter, read_hf_config(base))
    except CheckpointError as error:
        raise ConfigError(f"MODEL {word}: {error}") from error
    return Subject(word, base, is_hf=False, adapter=adapter)


def _of_run(word: str) -> Subject:
    place, _, step = word.removeprefix(RUN).rpartition("@") if "@" in word else (word.removeprefix(RUN), "", "")
    run_dir = Path(place)
    if not (run_dir / "resolved.json").is_file():
        raise ConfigError(f"MODEL {word}: {run_dir} has no resolved.json; give the directory of a run")
    checkpoints = {path.name.removeprefix(PREFIX): path for path in finished(run_dir / "checkpoints")}
    if step == "best":
        step = str(_best_step(word, run_dir, list(map(int, checkpoints))))
    versions = [str(version) for version in whole_versions(run_dir)]
    if "." in step:
        if step not in versions:
            there = ", ".join(versions) or "none (sync.method=checkpoint writes them)"
            raise ConfigError(f"MODEL {word}: no published weights {step} in {run_dir}; versions there: {there}")
        return _of_published(word, run_dir, step)
    if step:
        if step not in checkpoints:
            there = ", ".join(checkpoints) or "none"
            raise ConfigError(
                f"MODEL {word}: no finished checkpoint of step {step}; steps with one: {there} "
                "(trainer.keep_checkpoints keeps the newest)"
            )
        return _of_checkpoint(word, checkpoints[step])
    exported, newest = exported_step(run_dir), max((int(step) for step in checkpoints), default=0)
    if exported is not None and exported < newest:
        log.warning("MODEL %s: %s has the weights of step %d, and the run went on", word, run_dir / "hf", exported)
    elif (run_dir / "hf" / CONFIG).is_file():
        return Subject(word, run_dir / "hf", is_hf=True)
    if versions:
        return _of_published(f"{word}@{versions[-1]}", run_dir, versions[-1])
    if not checkpoints:
        raise ConfigError(f"MODEL {word}: it has neither an exported model (hf/) nor a finished checkpoint yet")
    step, path = list(checkpoints.items())[-1]
    return _of_checkpoint(f"{word}@{step}", path)


def _best_step(word: str, run_dir: Path, steps: Collection[int]) -> int:
    """Return the step of a run's best checkpoint. Raises ConfigError without ``trainer.keep_best``, or if no checkpoint
    is measured."""
    metric = load_resolved(run_dir / "resolved.json").trainer.keep_best
    if metric is None:
        raise ConfigError(f"MODEL {word}: the run has no trainer.keep_best; give a step")
    best = best_step(run_dir, metric, steps)
    if best is None:
        raise ConfigError(f"MODEL {word}: no finished checkpoint has a value of {metric} yet; give a step")
    return best


def _of_checkpoint(name: str, path: Path) -> Subject:
    """Return a finished checkpoint of a whole model, or of adapters to merge into their model."""
    from megarl.weights.checkpoint.convert.adapters import AdapterCheckpoint

    try:
        adapter = AdapterCheckpoint.of(path)
    except CheckpointError as error:
        raise ConfigError(f"MODEL {name}: {error}") from error
    if adapter is None:
        return Subject(name, path, is_hf=False)
    if not (adapter.base / CONFIG).is_file():
        raise ConfigError(
            f"MODEL {name}: its adapters are for {adapter.base}, which has no {CONFIG}; put the model back there"
        )
    return Subject(name, adapter.base, is_hf=False, adapter=adapter.path)


def _of_published(name: str, run_dir: Path, version: str) -> Subject:
    path = folder_of(run_dir, version)
    manifest = (path / MANIFEST).read_bytes()
    return Subject(name, path, is_hf=False, published=hashlib.blake2b(manifest, digest_size=16).hexdigest())
