"""Copies of checkpoints to a remote folder (``trainer.remote``), by a process beside rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.core.errors import JobError
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import die_with
from megarl.train.ranks import Ranks, Reporter, RunContext

LOOK_S = 0.2
NICE = 10
"""Added to the process's niceness: training goes first."""


class RemoteCopies:
    """Copies checkpoints one at a time. Every rank makes the same calls; without ``trainer.remote`` they do nothing."""

    def __init__(self, context: RunContext, ranks: Ranks, reporter: Reporter) -> None:
        self._run_dir, self._ranks, self._reporter = context.run_dir, ranks, reporter
        self._url = context.config.trainer.remote
        self._keep = context.config.trainer.keep_checkpoints
        self._is_first = context.rank == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._checkpoint: Path | None = None
        """Checkpoint of the last copy that was begun."""
        self._newer = 0
        """Checkpoints finished since that copy was begun."""

    def begin(self, checkpoint: Path) -> None:
        """Begin to copy a finished checkpoint, unless an earlier copy is still being written."""
        if self._url is None:
            return
        if not self._ranks.agree(self._done()):
            self._newer += 1
            self._reporter.log(f"{checkpoint} is not copied yet: {self._checkpoint} is still on its way to {self._url}")
            return
        self._warn_of_failure()
        self._checkpoint, self._newer = checkpoint, 0
        if self._is_first:
            parent = os.getpid()
            command = [sys.executable, "-m", "megarl.weights.checkpoint.training.remote_folder"]

            def prepare() -> None:
                die_with(parent, signal.SIGKILL)
                os.nice(NICE)

            self._process = subprocess.Popen(
                [*command, str(self._run_dir), str(checkpoint), self._url], preexec_fn=prepare
            )

    def before_removal(self) -> None:
        """Wait for a copy whose checkpoint the next finished one removes (``trainer.keep_checkpoints``)."""
        if self._url is not None and self._newer + 1 >= self._keep:
            self._wait()

    def finish(self, newest: Path | None) -> None:
        """Wait until the newest checkpoint is copied. Raises JobError if it cannot be."""
        if self._url is None or newest is None:
            return
        self._wait()
        if self._checkpoint != newest or not self._ranks.agree(self._copied()):
            self.begin(newest)
            self._wait()
        if not self._ranks.agree(self._copied()):
            raise JobError(
                f"{newest} was not copied to trainer.remote={self._url} (rank 0's log has the reason); make it "
                "writable and run the same command again, or leave trainer.remote out"
            )

    def stop(self) -> None:
        """End a copy that is being written, after an error; the next start writes it again."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        while not self._ranks.agree(self._done()):
            heartbeat.count_wait()
            time.sleep(LOOK_S)

    def _done(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _copied(self) -> bool:
        return not self._is_first or (self._process is not None and self._process.poll() == 0)

    def _warn_of_failure(self) -> None:
        if self._process is not None and self._process.poll():
            self._reporter.log(f"WARNING: {self._checkpoint} was not copied to trainer.remote={self._url}")
