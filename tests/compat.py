"""``make compat``: the tests with another Megatron-Core and Python, part by part (docs/compat.md).

``python -m tests.compat [PART ...]``, by the Python of an environment that has them. Status 1 when one failed.
"""

from __future__ import annotations

import sys

from tests.parts import PYTEST, Parts

COMPAT = Parts(
    "compat",
    {
        "parallel": (*PYTEST, "tests/parallel"),
        "a job": (*PYTEST, "tests/loop/test_job.py"),
        "unit": (*PYTEST, "tests/unit"),
    },
)

if __name__ == "__main__":
    sys.exit(COMPAT.main())
