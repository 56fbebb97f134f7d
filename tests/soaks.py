"""``make soak``: what is too long for ``make test``, part by part (docs/soak.md).

``python -m tests.soaks [PART ...]``. Status 1 when one failed.
"""

from __future__ import annotations

import sys

from tests.parts import PYTEST, Parts

MANY = (
    "agents", "algorithms_pairs", "algorithms_reference", "checkpoint_convert", "cuda_emulated", "host_memory",
    "ops_advantage", "ops_linear", "ops_policy", "reshard_families", "reshard_oracle", "rewards_math",
)  # fmt: skip
"""Unit tests that hold more cases here than in ``make test``."""
COMMANDS = {
    "same": (sys.executable, "-m", "tests.same"),
    "grids": (*PYTEST, "-m", "soak", "tests"),
    "long answers": (*PYTEST, "tests/loop/test_long_answers.py", "tests/loop/test_engine.py"),
    "slurm": (*PYTEST, "tests/system/test_slurm.py"),
    "many examples": (*PYTEST, *(f"tests/unit/test_{name}.py" for name in MANY)),
    "mutants": (sys.executable, "-m", "tests.mutants"),
    "sync mutants": (sys.executable, "-m", "tests.loop.sync_mutants"),
    "sync mutants, 8 bits": (sys.executable, "-m", "tests.loop.sync_mutants", "fp8", "1000", "2000"),
    "kills": (sys.executable, "-m", "tests.system.soak"),
    "chaos": (sys.executable, "-m", "tests.system.chaos", "--write"),
    "exam": (sys.executable, "-m", "megarl", "exam", "--healthy", "100", "--at-once", "2"),
    "controls": (sys.executable, "benchmarks/controls.py"),
}
SOAKS = Parts("soak", COMMANDS, {"MEGARL_SOAK": "1"})

if __name__ == "__main__":
    sys.exit(SOAKS.main())
