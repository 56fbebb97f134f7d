"""A conversion killed with SIGKILL and repeated gives the same bytes; its process stays within the memory contract."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.weights.checkpoint.formats.hf_files import header_bytes
from megarl.weights.checkpoint.formats.output import MANIFEST
from megarl.weights.reshard.layouts import hf_layout
from tests.conftest import SOAK
from tests.system import commands
from tests.system.commands import Command

CONFIG = {
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megarl", "convert", *map(str, arguments)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 MB."""
    path = tmp_path_factory.mktemp("kill") / "hf"
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in hf_layout(CONFIG).tensors.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def start(log: Path, *arguments: object) -> subprocess.Popen[bytes] | Command:
    """A conversion that is forked from a process with its imports, where it can be."""
    argv = command(*arguments)
    with log.open("wb") as output:
        return commands.start(argv[1:], dict(os.environ), output.fileno()) or subprocess.Popen(
            argv, stdout=output, stderr=output
        )


def run(log: Path, *arguments: object) -> str:
    """What a conversion printed that ended well."""
    status = start(log, *arguments).wait(timeout=120)
    assert status == 0, log.read_text()
    return log.read_text()


def killed(log: Path, out: Path, least: int, *arguments: object) -> int:
    """Kill a conversion once ``least`` of its files are finished; return how many are. One that has ended before it
    could be killed is begun again, without files."""
    journal = out.with_name(f".{out.name}.partial") / "journal.jsonl"
    for _ in range(50):
        process = start(log, *arguments)
        while process.poll() is None:
            done = journal.read_text().count("\n") - 1 if journal.is_file() else 0
            if done >= least:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        if process.wait(timeout=60) == -signal.SIGKILL and not out.exists():
            return journal.read_text().count("\n") - 1
        assert out.exists(), log.read_text()
        shutil.rmtree(out)
    raise AssertionError("50 conversions have ended before they could be killed")


def test_killed_and_repeated(source: Path, tmp_path: Path) -> None:
    """Round trip; the first half is killed twice, whenever some more files are finished."""
    whole, out, back, log = (tmp_path / name for name in ("whole", "out", "back", "log"))
    options = ("--file-gib", "0.001", "--workers", "2")
    run(log, "hf-to-megatron", source, whole, *options)
    finished = 0
    for _ in range(2):
        finished = killed(log, out, finished + 5, "hf-to-megatron", source, out, *options)
    files = len(list(whole.glob("__[0-9]*.distcp")))
    assert finished < files
    said = run(log, "hf-to-megatron", source, out, *options, "--verify")
    assert f"in {files} files, {finished} of them finished before" in said
    assert contents(out) == contents(whole)
    run(log, "megatron-to-hf", out, back, "--file-gib", "1")
    tensors = [json.loads((folder / MANIFEST).read_text())["tensors"] for folder in (whole, out, back)]
    same = [{name: value["digest"] for name, value in t.items()} for t in tensors]
    assert same[0] == same[1] == same[2]


def sparse(path: Path) -> int:
    """A checkpoint whose embedding has 0.5 GB, almost all of it a hole in the file; returns the embedding's bytes."""
    config = {
        **CONFIG,
        "vocab_size": 262144,
        "hidden_size": 1024,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }
    tensors = hf_layout(config).tensors
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header = header_bytes((n, torch.bfloat16, s) for n, s in tensors.items())
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + 2 * sum(torch.Size(s).numel() for s in tensors.values()))
    return 2 * 262144 * 1024


def peak(*arguments: object) -> int:
    """Peak resident bytes of one process (``ru_maxrss`` would begin with what this process had when it forked)."""
    process = subprocess.Popen(command(*arguments))
    proc, highest = Path(f"/proc/{process.pid}"), 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status = (proc / "status").read_text()
            if str(arguments[0]).encode() in (proc / "cmdline").read_bytes():  # not before it is a process of its own
                highest = max(
                    highest, *(int(s.split()[1]) << 10 for s in status.splitlines() if s.startswith("VmHWM")), 0
                )
        time.sleep(0.01)
    assert process.returncode == 0
    return highest


@pytest.mark.slow
def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    """The contract is 2 x the largest tensor + 1 GiB; blocks are streamed, so less than one such tensor is needed in
    fact. A reshard, in ``make soak``, reads as the way to HF does and writes as the way to Megatron."""
    largest = sparse(tmp_path / "hf")
    steps = {
        "to megatron": ("hf-to-megatron", tmp_path / "hf", tmp_path / "meg", "--verify", "--workers", "8"),
        **({"cut": ("reshard", tmp_path / "meg", tmp_path / "cut", "--tp", "4", "--workers", "8")} if SOAK else {}),
        "to hf": ("megatron-to-hf", tmp_path / ("cut" if SOAK else "meg"), tmp_path / "back", "--dtype", "float16"),
    }
    peaks = {name: peak(*arguments) for name, arguments in steps.items()}
    assert max(peaks.values()) <= 2 * largest + (1 << 30), peaks
    assert max(peaks.values()) < largest, f"{peaks}: a whole tensor was held"
