"""Registers, spills and shared memory of every CUDA kernel, as nvcc's ptxas reports them; no GPU is needed:
``python benchmarks/ptxas.py [--write] [SOURCE ...]``.

A spilled register costs a store and a load each time. ``--write`` puts the table into docs/benchmarks/kernels.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import page

CSRC = page.ROOT / "csrc"
ARCHITECTURES = ("sm_80", "sm_90a")
"""Those that CMakeLists.txt makes machine code for."""
_REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    r"([^\n]*)",
    re.DOTALL,
)


class Usage(NamedTuple):
    """What one kernel takes: registers of a thread; bytes that a thread spills; static shared bytes of a block."""

    registers: int
    spilled: int
    shared: int


def usage_of(source: Path, architecture: str) -> dict[str, Usage]:
    """Kernel -> what ptxas reports of it. Raises RuntimeError with nvcc's output where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-std=c++17", "-O3", f"-I{CSRC}", f"-arch={architecture}", "-Xptxas", "-v", "-cubin"]
        done = subprocess.run([*command, "-o", f"{folder}/cubin", str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc could not compile {source}:\n{done.stderr}")
    found = _REPORT.findall(done.stderr)
    names = subprocess.run(["c++filt"], input="\n".join(row[0] for row in found), capture_output=True, text=True)
    usage = {}
    for name, (_, stored, _, registers, rest) in zip(names.stdout.splitlines(), found, strict=True):
        shared = re.search(r"(\d+) bytes smem", rest)
        usage[short(name)] = Usage(int(registers), int(stored), int(shared[1]) if shared else 0)
    return usage


def short(name: str) -> str:
    """``local_kernel<Real, 512, true>`` of a demangled function with namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)|\b_GLOBAL__N_\w*|\bmegarl\b", "", name).replace("::", "")
    name = re.sub(r"\([a-z ]+\)(?=\w)", "", name)  # casts of template arguments
    return name.split("(")[0].removeprefix("void ").strip()


def table(sources: Iterable[Path]) -> str:
    """Markdown of all kernels of ``sources``; two numbers are those of the two architectures."""
    jobs = [(source, architecture) for source in sources for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(jobs, pool.map(lambda job: usage_of(*job), jobs), strict=True))
    lines = [
        f"Kernels compiled for {' / '.join(ARCHITECTURES)}; one number where both are the same.",
        "",
        "| kernel | registers | bytes spilled | shared bytes |",
        "|---|---|---|---|",
    ]
    for source in sources:
        first, *others = (reports[source, architecture] for architecture in ARCHITECTURES)
        for kernel in sorted(first):
            values = zip(first[kernel], *(other[kernel] for other in others), strict=True)
            cells = " | ".join(" / ".join(map(str, dict.fromkeys(column))) for column in values)
            lines.append(f"| {source.parent.name}: `{kernel}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, default=kernel_sources())
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/kernels.md")
    options = parser.parse_args()
    text = table(options.sources)
    print(text)
    if options.write:
        page.write("benchmarks/kernels.md", text)


def kernel_sources() -> list[Path]:
    """Every file of csrc that has kernels."""
    return sorted(path for path in CSRC.rglob("*.cu") if "__global__" in path.read_text())


if __name__ == "__main__":
    main()
