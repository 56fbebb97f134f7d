"""State of a process that makes no progress: its stacks, and the torch.distributed collective that it is in."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.processes import heartbeat
from megarl.core.processes.machine import group_members

STOPPED = "T"
STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waits for a disk or a device",
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "Z": "has ended",
    "X": "has ended",
}
"""Names of Linux' process state letters."""
ANSWER_S = 2.0
"""Seconds for processes to write their stacks."""
_QUIET_S = 0.2
"""Stacks that have not grown for this many seconds are complete."""
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_WAITS = re.compile(r"\.(wait|result|synchronize|recv|join)\(|[^.]\bwait\(")
_ROOT = f"{Path(heartbeat.__file__).parents[3]}/"
_STDLIB = sysconfig.get_path("stdlib")


class ProcessHeartbeat(NamedTuple):
    """Heartbeat of a process; sent between supervisors as a list."""

    beats: int
    """Progress marks so far."""
    work: int
    """Samples that an explorer has finished or scored so far."""
    step: int
    """Step from 1 on; 0 outside of steps."""
    timeout_s: float
    """Seconds that the current phase may be silent."""
    phase: str
    state: str
    """Linux' letter of the process state."""


class Account(NamedTuple):
    """State of one process, as its node reads it; sent between supervisors as a list."""

    state: str
    """Linux' letter of the process state; the letter of a stopped member of its group comes first."""
    kernel: str
    """Kernel function in which the process waits (``/proc/<pid>/wchan``); "" if unknown."""
    thread: int
    """Main thread; 0 if unknown."""
    stacks: str
    """Stacks of all threads; "" if the process did not write them."""


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = self.file.removeprefix(_ROOT).rpartition("site-packages/")[2]
        return f"{short}:{self.line} ({self.function})"


class CodeLocation(NamedTuple):
    """Current line of code and collective of a process."""

    collective: str
    """all_reduce, barrier, ...; "" outside of collectives."""
    frame: Frame | None
    """Innermost frame outside of torch.distributed and Python's library; None without stacks."""

    @property
    def waits(self) -> bool:
        """True if the process waits for another one, in a collective or elsewhere."""
        return bool(self.collective) or (self.frame is not None and bool(_WAITS.search(self.source)))

    @property
    def source(self) -> str:
        return "" if self.frame is None else linecache.getline(self.frame.file, self.frame.line).strip()

    def __str__(self) -> str:
        if self.frame is None:
            return "did not write its stacks"
        if self.collective:
            return f"in {self.collective} from {self.frame}"
        return f"{'waits at' if self.waits else 'in no collective:'} {self.frame}" + (
            f": {self.source}" if self.source else ""
        )


def state_of(pid: int) -> str:
    """Return Linux' letter of the process state; X for an ended process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def group_state(pid: int) -> str:
    """Return T if any process of the group is stopped, else the leader's letter."""
    return STOPPED if any(state_of(member) == STOPPED for member in group_members(pid)) else state_of(pid)


def ask(processes: Mapping[str, tuple[int, heartbeat.Memory]], timeout_s: float = ANSWER_S) -> dict[str, Account]:
    """Return the state of each process. ``processes``: (process id, memory) by name. Takes up to ``timeout_s``."""
    before = {name: memory.size() for name, (_, memory) in processes.items()}
    asked = set()
    for name, (pid, _) in processes.items():
        if state_of(pid) != STOPPED and _listens(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, heartbeat.ASK)
                asked.add(name)
    deadline, sizes, since = time.monotonic() + timeout_s, dict(before), time.monotonic()
    while time.monotonic() < deadline:
        now = {name: memory.size() for name, (_, memory) in processes.items()}
        if now != sizes:
            sizes, since = now, time.monotonic()
        if time.monotonic() - since > _QUIET_S and all(sizes[name] > before[name] for name in asked):
            break
        time.sleep(0.02)
    return {
        name: Account(group_state(pid), _kernel(pid), memory.read().thread, memory.stacks(before[name]))
        for name, (pid, memory) in processes.items()
    }


def _listens(pid: int) -> bool:
    """Return True if the process has a handler for SIGUSR1: without one the signal would end it."""
    with suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (heartbeat.ASK - 1) & 1)
    return False


def _kernel(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip().lstrip("0")
    return ""


def threads(text: str) -> dict[int, list[Frame]]:
    """Parse faulthandler's output: thread -> its frames, innermost first."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            frames = found[int(thread[1], 16)] = []
        elif (frame := _FRAME.match(line)) is not None:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return found


def location_of(account: Account) -> CodeLocation:
    """Return the location of the main thread or, if that is in no collective, of a thread that is in one (e.g.
    autograd's)."""
    found = threads(account.stacks)
    main = account.thread if account.thread in found else next(reversed(found), 0)  # the oldest is written last
    places = [_location(found.pop(main, [])), *(_location(frames) for frames in found.values())]
    return next((location for location in places if location.collective), places[0])


def _location(frames: Sequence[Frame]) -> CodeLocation:
    collective = ""
    for frame in frames:
        if frame.file.endswith(_COLLECTIVES):
            collective = frame.function  # the outermost is the function that our code called
        elif "torch/distributed/" not in frame.file and not _is_python(frame.file):
            return CodeLocation(collective, frame)
    return CodeLocation(collective, frames[-1] if frames else None)


def _is_python(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STDLIB) and "site-packages" not in file)


class ProcessSnapshot(NamedTuple):
    """State of a process at one moment: one row of the stall table."""

    name: str
    phase: str
    step: int
    silent_s: float
    account: Account

    @property
    def location(self) -> CodeLocation:
        """Code location of the process."""
        return location_of(self.account)

    def cells(self) -> tuple[str, str, str, str]:
        phase = self.phase + (f", step {self.step}" if self.step else "")
        return self.name, phase, f"{self.silent_s:.0f} s", self._doing()

    def _doing(self) -> str:
        state, kernel = self.account.state, self.account.kernel
        if self.account.stacks and state != STOPPED:
            return str(self.location) if kind_of(self.name) is ProcessKind.TRAINER else f"at {self.location.frame}"
        return f"{STATES.get(state, 'in a state of its own')} (state {state})" + (f" in {kernel}" if kernel else "")


def table(rows: Sequence[ProcessSnapshot]) -> str:
    """Return a table with one line per process: name, phase and step, seconds of silence, location."""
    cells = [("process", "phase", "silent", "where"), *(row.cells() for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join(
        " | ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in cells
    )


def verdict(rows: Sequence[ProcessSnapshot]) -> str:
    """Return a sentence that names the process that the others wait for, as far as the stacks show."""
    stopped = [row for row in rows if row.account.state == STOPPED]
    if stopped:
        return f"likely: {_names(stopped)} to blame: stopped by a signal"
    ranks = [row for row in rows if kind_of(row.name) is ProcessKind.TRAINER]
    waiting = [row for row in ranks if row.location.waits]
    where = ", ".join(sorted({row.location.collective or "a call that waits" for row in waiting}))
    deaf = [row for row in ranks if not row.account.stacks]
    others = [row for row in ranks if row not in waiting]
    if deaf and len(deaf) < len(ranks):
        return f"likely: {_names(deaf)} to blame: held in the kernel, see the state"
    if waiting and others:
        return f"likely: {_names(others)} to blame: in no collective, while {_names(waiting)} in {where}"
    kinds = Counter(row.location.collective for row in waiting if row.location.collective)
    if len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        odd = [row for row in waiting if row.location.collective and row.location.collective != usual]
        calls = ", ".join(sorted({row.location.collective for row in odd}))
        return f"likely: {_names(odd)} to blame: in {calls}, while the others are in {usual}"
    if kinds:
        return (
            f"all ranks wait in {next(iter(kinds))}: a connection between them is lost, or they are in it with "
            "different groups"
        )
    return "no rank is in a collective: see their stacks"


def _names(rows: Sequence[ProcessSnapshot]) -> str:
    names = [row.name for row in rows]
    if len(names) > 8:
        names = [*names[:8], f"{len(names) - 8} more"]
    return ", ".join(names) + (" is" if len(rows) == 1 else " are")
