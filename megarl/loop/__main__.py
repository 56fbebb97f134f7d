"""``python -m megarl.loop trainer|explorer --config RUN/resolved.json``: one process of a job.

Imports nothing heavy at the top: checkpoint writers are spawned, and every spawned process imports this file again.
"""

from __future__ import annotations

import os
import sys
import threading
import time

ALONE_S = 20.0
"""How long a process may outlive the supervisor: SIGTERM has come by then, and it may be saving a checkpoint."""


def _end_after(supervisor: int) -> None:
    """End this process, blocked in a collective or not, some time after its supervisor is gone."""
    while os.getppid() == supervisor:
        time.sleep(0.5)
    time.sleep(ALONE_S)
    os._exit(1)


def main() -> int:
    role, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if "MEGARL_SUPERVISOR" in os.environ:
        threading.Thread(target=_end_after, args=(int(os.environ["MEGARL_SUPERVISOR"]),), daemon=True).start()
    if role == "trainer":
        from megarl.loop.trainer import main as run
    elif role == "explorer":
        from megarl.loop.explorer import main as run
    else:
        sys.stderr.write("usage: python -m megarl.loop trainer|explorer --config RUN/resolved.json\n")
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
