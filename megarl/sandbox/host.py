"""This machine's bwrap, interpreter and code for the inside of sandboxes. Found once per process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import SandboxError
from megarl.sandbox import bubblewrap

NOBODY = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
INSIDE = ("values", "answer", "checker", "launcher", "zygote")
ASK_S = 60.0
ENVIRONMENT = {
    "PATH": "/python/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program's output depends on its input alone
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
START = (
    "import marshal,sys\nname,link,passed=sys.argv[1],*map(int,sys.argv[2:])\n"
    "file=open(link,'rb',closefd=False)\ncode,filter=marshal.load(file),marshal.load(file)\n"
    "exec(code[name],{'code':code,'filter':filter,'link':link,'passed':passed})"
)

PREPARE = """
import json, marshal, os, sys, sysconfig
code = {name: compile(text, name, "exec", dont_inherit=True) for name, text in json.loads(sys.stdin.read()).items()}
facts = {"version": list(sys.version_info[:3]), "base": sys.base_prefix, "platlib": sys.platlibdir,
         "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
         "site": sysconfig.get_path("purelib"), "code": marshal.dumps(code).hex()}
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Host:
    bwrap: str
    python: str
    """The interpreter for programs, as named in the settings."""
    version: str
    binds: tuple[str, ...]
    """Arguments of bwrap that mount it read-only as /python."""
    code: bytes
    """Code that runs inside, compiled by that interpreter."""
    filter: bytes
    user: int | None
    """User id of bwrap; None for our own. RLIMIT_NPROC does not apply to root, so as root bwrap runs as the user
    `nobody`."""
    nested: bool = True
    """True makes sandboxes inside a long-lived one (``inside/zygote.py``); a separate bwrap for each takes five times
    as long."""

    def command(self, first: str, tmp_bytes: int, link: int, passed: int, filter_fd: int | None) -> list[str]:
        """Return the command that runs our module ``first`` inside as process 1; ``link`` and ``passed`` (unless -1)
        are its only open connections."""
        # Without LD_BIND_NOW each process of each sandbox would look up libc's functions again.
        variables = ENVIRONMENT | {"LD_BIND_NOW": "1"} if first == "zygote" else ENVIRONMENT
        return bubblewrap.command(
            self.bwrap, ["/python/bin/python3", "-S", "-s", "-c", START, first, str(link), str(passed)],
            shown=self.binds, writable={"/tmp": tmp_bytes}, variables=variables, folder="/tmp", filter_fd=filter_fd,
        )  # fmt: skip


@functools.cache
def find(named: str | None = None) -> Host:
    """Find this machine's sandbox; ``named``: interpreter of programs (``reward.code.python``). Raises SandboxError
    naming what is missing and the fix."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "code is only run in bubblewrap, and bwrap is not on the PATH: apt-get install bubblewrap (dnf, pacman: "
            "the same name), or set reward.code.url to a `megarl sandbox serve` on a host that has it"
        )
    user = NOBODY if os.geteuid() == 0 else None
    tried = []
    for python in (
        [named]
        if named
        else [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]
    ):
        facts, why = ask(python, user, sources())
        if facts is None:
            tried.append(f"{python}: {why}")
            continue
        version = ".".join(map(str, facts["version"]))
        binds = tuple(_binds(facts, with_site=bool(named)))
        return Host(bwrap, python, version, binds, bytes.fromhex(facts["code"]), bubblewrap.program(), user)
    raise SandboxError(
        f"no Python that {'uid 65534 (root starts sandboxes as nobody)' if user else 'this user'} can run: "
        f"{'; '.join(tried)}. Set reward.code.python (megarl sandbox --python) to an interpreter of version 3.9 or "
        "later that others may read"
    )


def sources() -> dict[str, str]:
    """Return our code that runs inside, by name."""
    folder = Path(__file__).parent / "inside"
    return {name: (folder / f"{name}.py").read_text() for name in INSIDE}


def ask(python: str, user: int | None, code: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Ask an interpreter for its version and paths, with our code compiled by it; or return the reason why it cannot be
    used."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PREPARE], input=json.dumps(code), capture_output=True, text=True, timeout=ASK_S,
            cwd="/", env={"LANG": "C.UTF-8"}, **bubblewrap.popen_user(user),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        return None, done.stderr.strip().rpartition("\n")[2][:300] or f"exit code {done.returncode}"
    facts = json.loads(done.stdout)
    if facts["version"] < [3, 9]:
        return None, f"version {facts['version']} is older than 3.9"
    return facts, ""


def _binds(facts: dict[str, Any], with_site: bool) -> list[str]:
    """Return bwrap's mounts: the system's libraries at their paths, the interpreter and its standard library under
    /python; no home, no /etc, no shell."""
    arguments = bubblewrap.as_they_are(LIBRARIES)
    for name in dict.fromkeys(("lib", facts["platlib"])):
        if os.path.isdir(os.path.join(facts["base"], name)):
            arguments += ["--ro-bind", os.path.join(facts["base"], name), f"/python/{name}"]
    arguments += ["--ro-bind", facts["executable"], "/python/bin/python3", "--setenv", "PYTHONHOME", "/python"]
    arguments += ["--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    if with_site and os.path.isdir(facts["site"]):
        arguments += ["--ro-bind", facts["site"], "/python/site"]
    return arguments
