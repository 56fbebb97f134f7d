"""GPUs and fabric of a node. The texts are written by hand after the documentation: `nvidia-smi --help-query-gpu` and
nvml.h (formats and bits), the kernel's Documentation/ABI/stable/sysfs-class-infiniband (ports). One test runs where
there is a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.run.nodes import gpu_state, health
from tests.unit.small_job import config_of

NODE = """\
NVIDIA H100 80GB HBM3, 9.0, 81559, 1980, 345, P0, 0x0000000000000001, 0, No
NVIDIA H100 80GB HBM3, 9.0, 81559, 1980, 1980, P0, 0x0000000000000004, 0, No
"""
BAD = """\
NVIDIA H100 80GB HBM3, 9.0, 81559, 1980, 345, P0, 0x0000000000000048, 0, No
NVIDIA H100 80GB HBM3, 9.0, 81559, 1755, 1755, P0, 0x0000000000000000, 2, Yes
"""
CONSUMER = "NVIDIA GeForce RTX 3090, 8.6, 24576, 2100, 210, P8, 0x0000000000000001, [N/A], [N/A]\n"


def test_a_node_that_is_well() -> None:
    first, second = gpu_state.parse_gpus(NODE)
    assert (first["name"], first["memory.total"], second["clocks.sm"]) == ("NVIDIA H100 80GB HBM3", "81559", "1980")
    assert gpu_state.faults([first, second]) == []  # idle and a power cap are no faults
    (other,) = gpu_state.parse_gpus(CONSUMER)
    assert "remapped_rows.pending" not in other and gpu_state.faults([other]) == []


def test_what_is_wrong_with_gpus_is_named() -> None:
    found = gpu_state.faults(gpu_state.parse_gpus(BAD))
    assert found == [
        "GPU 0 is slowed down (HW slowdown, HW thermal slowdown; 345 of 1980 MHz, P0)",
        "GPU 1 had 2 uncorrected ECC errors since its driver was loaded; reset it",
        "GPU 1 has rows of memory to be remapped; reset it",
    ]


def ports(folder: Path, *found: tuple[str, str, str]) -> dict[str, str]:
    for name, state, rate in found:
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    return gpu_state.fabric(folder)


def test_nodes_are_compared(tmp_path: Path) -> None:
    up, slow, down = (
        ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("1: DOWN", "10 Gb/sec (4X SDR)"),
    )
    head = ports(tmp_path / "a", ("mlx5_0", *up), ("mlx5_1", *up))
    assert head == {"mlx5_0/1": "ACTIVE, 400 Gb/sec (4X NDR)", "mlx5_1/1": "ACTIVE, 400 Gb/sec (4X NDR)"}
    same = ports(tmp_path / "b", ("mlx5_2", *up), ("mlx5_3", *up))  # names may differ
    assert gpu_state.differences("n0", (gpu_state.parse_gpus(NODE), head), (gpu_state.parse_gpus(NODE), same)) == []
    worse = ports(tmp_path / "c", ("mlx5_0", *slow), ("mlx5_1", *down))
    assert gpu_state.differences("n0", (gpu_state.parse_gpus(NODE), head), (gpu_state.parse_gpus(BAD), worse)) == [
        "GPU 1: clocks.max.sm 1755 MHz, but 1980 MHz on n0",
        "ports of its fabric: 1 ACTIVE, 200 Gb/sec (4X HDR), 1 DOWN, 10 Gb/sec (4X SDR); on n0: 2 ACTIVE, 400 Gb/sec "
        "(4X NDR)",
    ]


def test_they_are_faults_of_the_node(tmp_path: Path) -> None:
    head = replace(health.facts("n0", "127.0.0.1"), gpus=2, devices=gpu_state.parse_gpus(NODE))
    node = replace(head, name="n1", devices=gpu_state.parse_gpus(BAD))
    found = health.faults(head, [(node, node.clock)], config_of(tmp_path))
    assert list(found) == ["n1"] and len(found["n1"]) == 4
    assert health.from_message(vars(node)) == node


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def test_fields_that_a_driver_does_not_know_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = (
        'case "$1" in *remapped*) echo \'Field "remapped_rows.pending" is not a valid field to query.\'; exit 2;; '
        "esac\n"
    )
    executable(tmp_path / "nvidia-smi", script + f"echo '{NODE.splitlines()[0].removesuffix(', No')}'\n")
    (found,) = gpu_state.gpus()
    assert found["pstate"] == "P0" and "remapped_rows.pending" not in found
    executable(tmp_path / "nvidia-smi", "echo No devices were found >&2\nexit 6\n")
    assert gpu_state.gpus() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("3,5", ["3", "5"]),
        (" GPU-8932 , 1", ["GPU-8932", "1"]),
        ("2,-1,3", ["2"]),
    ],
)
def test_gpus_that_the_job_may_use(tmp_path: Path, given: str | None, expected: list[str]) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    assert gpu_state.visible({} if given is None else {"CUDA_VISIBLE_DEVICES": given}, tmp_path) == expected


def test_gpus_are_counted_by_device_files_where_the_driver_shows_no_folder(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert gpu_state.visible({}, tmp_path / "absent", tmp_path) == ["0", "1"]


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    found = gpu_state.gpus()
    assert found and all({"name", "memory.total", "clocks.max.sm", "pstate"} <= gpu.keys() for gpu in found)
