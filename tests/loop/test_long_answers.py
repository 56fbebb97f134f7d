"""A whole job whose answers have 24,500 tokens each: rollout, reward, inference and update on
TP2 × CP2, its stream cut once."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.buffer.store import Store
from megarl.config.schema import FromScratchConfig
from megarl.core.schema import Task
from megarl.learn.models.from_scratch import create
from megarl.tasks import write_rows
from tests.system.jobs import Job

TOKENS = 24_500
CUT = ("ss", "-H", "-K", "-t", "state", "established", "dst", "127.0.0.1")
"""Aborts all TCP connections to a port; ``dport = PORT`` is still to come."""
END = 4
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
"""


def write_model(folder: Path) -> Path:
    """One layer. Its end token is hardly ever sampled: its logit is 0, and of the others some are always far above."""
    config = FromScratchConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TOKENS + 64,
    )
    create(folder, config, ["1 + 2 ="], seed=1)
    tensors = load_file(folder / "model.safetensors")
    head = 1.5 * torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1))
    head[END] = 0
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Ended, with status 0, though the connection of its explorer to the engine was cut while it generated."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "reward.py").write_text(REWARD)
    for split, numbers in (("train", (1, 2)), ("eval", (3,))):
        prompts = [({"role": "user", "content": f"{number} + 2 ="},) for number in numbers]
        rows = [Task(f"{split}/{i}", "mine", prompt, "math", {"ground_truth": "2"}) for i, prompt in enumerate(prompts)]
        write_rows(folder / f"{split}.parquet", rows)
    job = Job(
        folder / "run",
        [
            "experiment=own",
            "algorithm=grpo",
            f"model.path={write_model(folder / 'model')}",
            f"reward.path={folder / 'reward.py'}",
            f"taskset.train={folder / 'train.parquet'}",
            f"taskset.eval={folder / 'eval.parquet'}",
            "parallel.tp=2",
            "parallel.cp=2",
            "trainer.steps=1",
            "trainer.tasks_per_step=1",
            "algorithm.group_size=2",
            "trainer.optimizer.lr=1e-3",
            "cluster.stall_s=120",
            f"rollout.max_response_tokens={TOKENS}",
            f"trainer.max_tokens_per_micro_batch={TOKENS + 60}",
            "rollout.max_num_seqs=4",
            "rollout.kv_cache_bytes=67108864",
            "rollout.request_timeout_s=20",
        ],
    )
    try:
        job.start()
        cut(job)
        assert ranks_with_a_store(job) == [0]
        assert job.wait(900) == 0, job.output.read_text()
        yield job
    finally:
        job.clean_up()


def ranks_with_a_store(job: Job) -> list[int]:
    """Trainer ranks that have the store's file open: the one that reads for its node, and writes."""
    return [
        rank
        for rank in range(4)
        if any(file.path.endswith("store.db") for file in psutil.Process(job.pid_of(f"trainer {rank}")).open_files())
    ]


def cut(job: Job) -> None:
    """Abort the TCP connections to the engine during the training step until the explorer has met it with a request
    under way."""
    job.until(lambda: bool(job.query("select 1 from rollouts where rollout_id like 'train%'")), "a rollout", 600)
    [port] = re.findall(r"--port[ =](\d+)", job.processes()[job.pid_of("engine")])

    def retried() -> bool:
        subprocess.run([*CUT, "dport", "=", port], capture_output=True, check=True)
        time.sleep(1)
        return bool(job.query("select 1 from events where kind = 'engine_retry'"))

    job.until(retried, "a request that was sent again", 300)


def can_cut() -> bool:
    """Whether ``ss -K`` aborts a connection here: it needs root, and a kernel with INET_DIAG_DESTROY, and says nothing
    without."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        subprocess.run([*CUT, "dport", "=", str(server.getsockname()[1])], capture_output=True, check=False)
        connection.setblocking(False)
        try:
            return connection.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


pytestmark = [
    pytest.mark.soak,  # test_replaced.py has requests that are sent again, test_faults.py context parallelism
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        shutil.which("ss") is None or not can_cut(),
        reason="ss -K (root, iproute2, INET_DIAG_DESTROY) cuts no connection",
    ),
]


def test_every_answer_has_all_its_tokens(job: Job) -> None:
    store = Store(f"sqlite:///{job.run_dir}/store.db")
    [rollout] = [str(row[0]) for row in job.query("select rollout_id from rollouts where rollout_id like 'train%'")]
    trajectories = store.groups.trajectories(rollout)
    assert [e.response_length for e in trajectories] == [TOKENS, TOKENS]
    assert all(e.finish_reason == "length" for e in trajectories)
    assert len({e.reward.score for e in trajectories}) == 2
    assert store.journal.events("engine_retry")  # the cut
    [(_, metrics)] = store.journal.steps()
    assert (
        metrics["training/rollout_logp_diff_max"] is not None and 0 < metrics["training/rollout_logp_diff_max"] < 1e-3
    )
    store.close()
