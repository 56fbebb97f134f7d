"""``python -m tests.system.inside NAMESPACE NAME=VALUE... MODULE ARGUMENT...``: run a module in a network namespace.

For commands that are forked (``tests/system/commands.py``), which ``nsenter`` cannot start. The variables are those
that a fork cannot have from its beginning, since an import could have read them.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

CLONE_NEWNET = 0x40000000


def main() -> None:
    namespace, *rest = sys.argv[1:]
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
    while "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
