"""``python -m megarl.run.start trainer|explorer|bench --config RUN/resolved.json``: one process of a job.

Heavy imports are inside functions: explorer and bench need no torch.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from megarl.core.errors import MemoryFullError
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import end_after_parent, uncollected
from megarl.core.processes.secrets import hide_secrets


def main() -> int:
    """Run the process that the first argument names; return the exit status."""
    role, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    hide_secrets()  # from commands of agents
    with uncollected():
        if role == "explorer" or (role == "trainer" and os.environ.get("RANK") == "0"):  # rank 0 asks a verifier again
            from megarl.rewards.pool.child import fork_root

            fork_root()  # heartbeat and parent watch run in threads
        heartbeat.begin()  # `kill -USR1 <pid>` writes the process's stacks to its log
        end_after_parent()
        if role == "trainer":
            from megarl.train.trainer import main as run
        elif role == "explorer":
            from megarl.explore.explorer.explorer import main as run
        elif role == "bench":
            from megarl.explore.bench import main as run
        else:
            sys.stderr.write("usage: python -m megarl.run.start trainer|explorer|bench --config RUN/resolved.json\n")
            return 2
    if role == "explorer":
        leave(run, arguments)
    status = run(arguments)
    if status == MemoryFullError.STATUS:
        _end(status)  # its peers fail when its connections close: its own status must exist before
    return status


def leave(run: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Run ``run`` and end the process with its status, without waiting for threads: an agent's client may block in
    one."""
    try:
        status = run(arguments)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process without Python's teardown."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
