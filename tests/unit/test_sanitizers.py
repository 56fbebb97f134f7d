"""The kernels read and write nothing that is not theirs, and do nothing that C++ leaves undefined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_kernels_are_clean_under_address_and_undefined_behaviour_sanitizers():
    script = Path(__file__).parents[1] / "native" / "sanitized.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), done.stdout + done.stderr[-8000:]
