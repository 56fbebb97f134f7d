"""Time and peak memory of ``megarl convert`` on a checkpoint of some GB, and a run that is killed half-way and
repeated.

Every step is a process of its own; its peak is the kernel's ``ru_maxrss`` of that process.

    python benchmarks/convert.py --gb 4.9 --workers 2 --scratch /tmp/convert
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import page
import torch

from megarl.weights.checkpoint.formats.hf_files import INDEX, header_bytes
from megarl.weights.checkpoint.formats.output import MANIFEST
from megarl.weights.checkpoint.formats.slices import as_bytes
from megarl.weights.reshard.layouts import hf_layout

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""Qwen3-4B but for the number of layers."""
BLOCK = 8 << 20


def make(path: Path, gb: float) -> Path:
    """A checkpoint of about so many GB of random bfloat16, in files of about 1 GB; made once."""
    one = sum(
        torch.Size(s).numel() for n, s in hf_layout({**CONFIG, "num_hidden_layers": 1}).tensors.items() if "layers" in n
    )
    ends = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    config = {**CONFIG, "num_hidden_layers": max(int((gb * 1e9 / 2 - ends) / one), 1)}
    if (path / "config.json").is_file() and json.loads((path / "config.json").read_text()) == config:
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    groups: list[list[str]] = [[]]
    used = 0
    tensors = hf_layout(config).tensors
    for name, shape in tensors.items():
        size = torch.Size(shape).numel() * 2
        if groups[-1] and used + size > 1 << 30:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    generator = torch.Generator().manual_seed(0)
    for file, group in zip(names, groups, strict=True):
        with (path / file).open("wb") as stream:
            stream.write(header_bytes((n, torch.bfloat16, tensors[n]) for n in group))
            left = sum(torch.Size(tensors[n]).numel() for n in group)
            while left:
                block = torch.randn(min(left, BLOCK), generator=generator).bfloat16()
                stream.write(as_bytes(block))
                left -= block.numel()
    weight_map = {n: file for file, group in zip(names, groups, strict=True) for n in group}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return path


def run(*arguments: object) -> tuple[float, float]:
    """(seconds, peak resident GiB) of one ``megarl convert``; ends this program when it fails."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "megarl", "convert", *map(str, arguments)])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"megarl convert {' '.join(map(str, arguments))} ended with {process.returncode}")
    return time.monotonic() - began, usage.ru_maxrss / 2**20


def run_and_kill(target: Path, *arguments: object) -> int:
    """SIGKILL a conversion when about half of it is written; returns how many files were finished."""
    partial = target.with_name(f".{target.name}.partial")
    journal = partial / "journal.jsonl"
    size = sum(f.stat().st_size for f in Path(str(arguments[1])).rglob("*") if f.is_file())
    process = subprocess.Popen([sys.executable, "-m", "megarl", "convert", *map(str, arguments)])
    while process.poll() is None:
        written = sum(f.stat().st_size for f in partial.glob("*") if f.is_file()) if partial.is_dir() else 0
        if written > size / 2 and journal.is_file() and journal.read_text().count("\n") > 1:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return journal.read_text().count("\n") - 1
        time.sleep(0.02)
    raise SystemExit("the conversion ended before it could be killed; make the checkpoint larger")


def digests(path: Path) -> dict[str, str]:
    tensors = json.loads((path / MANIFEST).read_text())["tensors"]
    return {name: value["digest"] for name, value in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/megarl-convert"))
    parser.add_argument("--write", action="store_true", help="also write the figures into docs/benchmarks/convert.md")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    options = parser.parse_args()
    scratch: Path = options.scratch
    source = make(scratch / "hf", options.gb)
    for old in ("megatron", "tp4", "back", "killed"):
        shutil.rmtree(scratch / old, ignore_errors=True)
        shutil.rmtree(scratch / f".{old}.partial", ignore_errors=True)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 2
    bound = 2 * largest / 2**30 + 1
    common = ("--workers", options.workers, "--file-gib", 0.5)
    rows = []
    for name, step in (
        ("HF to Megatron", ("hf-to-megatron", source, scratch / "megatron", *common)),
        (
            "Megatron to TP4 PP2, --verify",
            ("reshard", scratch / "megatron", scratch / "tp4", "--tp", 4, "--pp", 2, "--verify", *common),
        ),
        ("Megatron (TP4 PP2) to HF", ("megatron-to-hf", scratch / "tp4", scratch / "back", *common)),
        ("inspect --digests", ("inspect", scratch / "back", "--digests", "--json")),
    ):
        rows.append((name, *run(*step)))
    killed = ("hf-to-megatron", source, scratch / "killed", *common)
    finished = run_and_kill(scratch / "killed", *killed)
    rows.append((f"HF to Megatron, after SIGKILL with {finished} files finished", *run(*killed)))
    same = (
        digests(scratch / "megatron")
        == digests(scratch / "tp4")
        == digests(scratch / "back")
        == digests(scratch / "killed")
    )
    equal = all(
        (scratch / "killed" / f.name).read_bytes() == f.read_bytes() for f in (scratch / "megatron").glob("*.distcp")
    )
    text = page.Text()
    say = text.say

    say(f"\n{size / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB, bound 2 x largest + 1 GiB = {bound:.2f} GiB\n")
    say("| step | seconds | MB/s | peak RSS |\n|---|---|---|---|")
    for name, seconds, peak in rows:
        say(f"| {name} | {seconds:.1f} | {size / 1e6 / seconds:.0f} | {peak:.2f} GiB |")
    say(f"\ndigests of all targets equal: {same}; killed and repeated equals uninterrupted, byte by byte: {equal}")
    if options.write:
        page.write("benchmarks/convert.md", str(text))
    if not options.keep:
        shutil.rmtree(scratch)
    if not (same and equal and max(peak for *_, peak in rows) <= bound):
        raise SystemExit("a contract does not hold")


if __name__ == "__main__":
    main()
