"""``megarl doctor``: every line with its state; each fault is found, named with its fix, and decides the verdict."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.processes import machine
from megarl.run.report import doctor


def _states(checks: Any) -> dict[str, tuple[str, str, str]]:
    return {c.name: (c.state, c.found, c.fix) for c in checks}


def test_this_machine() -> None:
    text, healthy = doctor.examine("127.0.0.1")
    lines = text.splitlines()
    names = {line.split()[1] for line in lines if line[:5].strip() in {"ok", "warn", "fail"}}
    assert {
        "python",
        "cores",
        "memory",
        "disk",
        "/dev/shm",
        "torch",
        "megatron-core",
        "vllm",
        "kernels",
        "ports",
    } <= names
    assert healthy is not any(line.startswith("fail") for line in lines)
    assert lines[-1].startswith("ready") is healthy
    assert importlib.metadata.version("torch") in text


def test_heavy_packages_are_not_imported() -> None:
    code = (
        "import sys; from megarl.run.report.doctor import examine; examine('127.0.0.1')\n"
        "print([m for m in ('vllm', 'transformer_engine', 'megatron', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"


def test_every_fault_has_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    checks = list(doctor.packages())
    failed = {c.name for c in checks if c.state == "fail"}
    assert {"torch", "megatron-core", "vllm", "vLLM plugin"} <= failed
    assert all(c.fix for c in checks if c.state != "ok")
    assert _states(checks)["apex"][0] == "ok", "optional packages are no fault"


def test_foreign_plugin_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(name="lora", value="vllm:lora")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (other,))
    assert _states(doctor.packages())["vLLM plugin"][0] == "fail"


def test_extension_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import megarl

    monkeypatch.setitem(sys.modules, "megarl.ops", None)
    monkeypatch.delattr(megarl, "ops", raising=False)
    state, _, fix = _states(doctor.kernels())["kernels"]
    assert state == "fail" and "pip install -e ." in fix
    text, healthy = doctor.examine("127.0.0.1")
    assert not healthy and text.splitlines()[-1].startswith("not ready") and "kernels" in text.splitlines()[-1]


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_host_that_is_not_ours(host: str) -> None:
    state, _, fix = _states(doctor.network(host))["ports"]
    assert state == "fail" and "run.host" in fix


def test_connection_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    checks = _states(doctor.network("127.0.0.1"))
    assert checks["ports"][0] == "ok" and checks["connection"][0] == "fail"


def test_proxy_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    assert _states(doctor.network("127.0.0.1"))["proxy"][0] == "warn"
    monkeypatch.setenv("no_proxy", "example.org,127.0.0.1")
    assert "proxy" not in _states(doctor.network("127.0.0.1"))


def test_poor_machine_only_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=1, used=1, free=0))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    checks = _states(doctor.environment())
    for name in ("memory", "disk", "/dev/shm", "C++ compiler"):
        assert checks[name][0] == "warn" and checks[name][2], name


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"max": "max\n", "current": "900\n"}, None),
        ({"max": "1000\n", "current": "900\n"}, 100),
        (
            {
                "max": "1000\n",
                "current": "900\n",
                "stat": "anon 200\nfile 700\ninactive_file 600\nactive_file 50\nshmem 50\n",
            },
            750,
        ),
        ({"max": "1000\n", "current": "1100\n"}, 0),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], available: int | None
) -> None:
    """Pages of files that were read, a model's among them, are given back when they are needed."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    found = machine.available_memory()
    assert found > 2**20 if available is None else found == available
