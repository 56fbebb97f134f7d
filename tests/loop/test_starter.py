"""Each folder of ``megarl init`` trains a step as it is."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.core.processes.fork import ForkServer
from megarl.explore.agents.program import with_loopback
from megarl.run.launch.starter import KINDS
from tests.system.jobs import START_S, Job

SHORT = ("trainer.steps=1",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_trains(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"my_{kind}"
    assert main(["init", str(folder), "--kind", kind]) == 0
    job = Job(folder / "run", ("--config-dir", str(folder), f"experiment=my_{kind}", *SHORT))
    try:
        assert job.start().wait(2 * START_S) == 0, job.output.read_text()
    finally:
        job.clean_up()
    assert "Traceback" not in job.output.read_text()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 1


def test_variables_of_agents_keep_no_process_from_being_forked() -> None:
    requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, environment = ForkServer(requests, {"PATH": "/bin"}), {"PATH": "/bin", **with_loopback({})}
    assert len(environment) > 1 and server.differing(environment) == set()
    assert server.differing({**environment, "PATH": "/usr/bin"}) == {"PATH"}
    server.close()
    other.close()
