"""Other builds of ``csrc`` for tests: CUDA kernels emulated on the host, everything in float64, with sanitizers.

``python tests/native/build.py --emulated`` prints the extension's path. Objects and extensions are kept in
``build/native`` by the hash of what they are made of; processes that build the same thing at once do not disturb each
other.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "native"
COMMON = [
    "-std=gnu++17",
    "-O1",
    "-g0",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas", "-Werror=return-type"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-fno-omit-frame-pointer"]


@functools.cache
def extension(*, emulated: bool = False, double: bool = False, sanitize: bool = False, jobs: int = 2) -> ModuleType:
    """Build (where needed) and import.

    Args:
        emulated: with a submodule ``cuda`` whose kernels run on host memory (tests/native/cuda_runtime.h).
        double: ``real`` is float64; there are no 16-bit logits.
        sanitize: address and undefined-behaviour sanitizers; the process must run in :func:`sanitizer_environment`.
    """
    path = build(emulated=emulated, double=double, sanitize=sanitize, jobs=jobs)
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    assert spec is not None and spec.loader is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module


def build(*, emulated: bool = False, double: bool = False, sanitize: bool = False, jobs: int = 2) -> Path:
    """Path of the extension, which is built if it is not there. Raises RuntimeError with the compiler's output."""
    name = "_C" + "_emulated" * emulated + "_double" * double
    flags = COMMON + WARNINGS + ["-DMEGARL_DOUBLE"] * double
    flags += ["-DMEGARL_CUDA", "-DMEGARL_EMULATED", "-Itests/native"] * emulated
    flags += ["-Icsrc"]
    headers = [
        p
        for folder in ("csrc", "tests/native")
        for p in sorted((ROOT / folder).rglob("*"))
        if p.suffix in (".h", ".inc")
    ]
    shared = _hash(_compiler(), *(f"{p.name}\n{p.read_text()}" for p in headers))
    objects = OUT / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    todo, linked = [], []
    for source in sorted((ROOT / "csrc").rglob("*.c*")):
        if source.suffix == ".cu" and not emulated:
            continue
        command, folders = _command(source.relative_to(ROOT), flags, name)
        if sanitize and source.name != "module.cpp":  # that one is slow to compile and only passes pointers on
            command += SANITIZE
        result = objects / f"{_hash(shared, source.read_text(), *command)}.o"
        linked.append(result)
        if not result.exists():
            todo.append((result, command + folders))
    todo.sort(key=lambda item: "module.cpp" not in str(item[1]))  # the slowest first
    with (OUT / "lock").open("w") as lock, ThreadPoolExecutor(jobs) as pool:
        if todo:  # whoever waited here finds the objects of the one before
            fcntl.flock(lock, fcntl.LOCK_EX)
        list(pool.map(lambda item: _run(item[0], item[1]), [item for item in todo if not item[0].exists()]))
    link = ["g++", "-shared", "-fopenmp", *SANITIZE * sanitize, *map(str, linked)]
    path = OUT / _hash(*link) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _run(path, link)
    return path


def sanitizer_environment() -> dict[str, str]:
    """The environment of a Python process that can import an extension with sanitizers."""
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={x}"], text=True).strip()
        for x in ("libasan.so", "libstdc++.so")
    ]
    options = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return {**os.environ, **options, "LD_PRELOAD": " ".join(libraries)}


def _command(source: Path, flags: list[str], name: str) -> tuple[list[str], list[str]]:
    """What compiles a source in ``ROOT``, and folders of headers whose versions stand for their contents."""
    command, folders = ["g++", *flags], []
    if source.name == "module.cpp":
        import pybind11

        folders = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
        command += [f"-DMEGARL_MODULE={name}", f"-DPYBIND11_OF={pybind11.__version__}"]
        command += ['-DMEGARL_CUDA_STATE="emulated"', "-O0"]
    if source.name.startswith("kernels"):
        command += ["-DMEGARL_ISA=generic"]
    return [*command, "-x", "c++", "-c", str(source)], folders


def _run(result: Path, command: list[str]) -> None:
    temporary = result.with_name(f"{result.name}.{os.getpid()}.{os.urandom(4).hex()}")
    done = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)
    os.replace(temporary, result)


@functools.cache
def _compiler() -> str:
    return subprocess.check_output(["g++", "--version"], text=True).splitlines()[0] + sys.version


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("emulated", "double", "sanitize"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    print(build(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
