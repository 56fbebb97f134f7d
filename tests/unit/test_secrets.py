"""Keys of a process are not in what other processes read of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.errors import ConfigError
from megarl.core.processes.secrets import shared_key

PROGRAM = """
import os, subprocess
from megarl.core.processes.secrets import hide_secrets
before = open("/proc/self/environ", "rb").read()
hide_secrets()
after = open("/proc/self/environ", "rb").read()
child = subprocess.check_output(["env"]).decode()
print(before.count(b"s3cret"), after.count(b"s3cret"), child.count("s3cret"), os.environ["HF_TOKEN"])
print(b"PLAIN=seen" in after)
"""


def test_secrets_are_gone_from_what_others_read_and_are_passed_on() -> None:
    secrets = {"MEGARL_JOB_KEY": "s3cret-key", "HF_TOKEN": "s3cret-token", "PGPASSWORD": "s3cret", "PLAIN": "seen"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **secrets}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "0", "3", "s3cret-token", "True"]


def test_entries_that_are_no_variable_are_passed_over() -> None:
    """``execve`` takes any text as an entry; Python has none of these in ``os.environ``."""
    program = f"""
import ctypes
libc = ctypes.CDLL(None)
entries = (ctypes.c_char_p * 3)(b"A_KEY_WITHOUT_VALUE", b"HF_TOKEN=s3cret", None)
arguments = (ctypes.c_char_p * 4)({sys.executable!r}.encode(), b"-c", {PROGRAM!r}.encode(), None)
libc.execve(arguments[0], arguments, entries)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[:2] == ["1", "0"], done.stderr


def test_programs_that_start_together_have_one_key_that_nobody_else_can_read(tmp_path: Path) -> None:
    imports = "from pathlib import Path; from megarl.core.processes.secrets import shared_key"
    code = f"{imports}; print(shared_key(Path('{tmp_path}/key')))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {process.communicate(timeout=60)[0] for process in started}
    assert len(keys) == 1 and len(keys.pop().strip()) >= 32
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        shared_key(tmp_path / "key")
