"""A rollout engine: vLLM's OpenAI server in processes of its own. Nothing here imports vLLM."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from megarl.config.lengths import context_tokens
from megarl.config.schema import ModelConfig, RolloutConfig

PLUGIN = "megarl"
"""Entry point of the groups ``vllm.general_plugins`` and ``vllm.endpoint_plugins``, and name of the weight backend."""

UNTIL_PUBLISHED = "MEGARL_UNTIL_PUBLISHED"
"""Variable that makes a server refuse generation until a publication has succeeded: one that was replaced in the middle
of a job must not answer with the weights of the model's files."""

_SEGMENT = re.compile(
    r"/dev/shm/(psm_[0-9a-f]+"  # multiprocessing.shared_memory: vLLM's queues
    r"|torch_[0-9]+_[0-9]+_[0-9]+"  # torch's shared tensors
    r"|[^/]+-cpushm[^/]*"  # vLLM's tensor parallelism on a CPU
    r"|vllm_(offload|ec)_[^/]+\.mmap"  # caches on the host
    r"|nccl-[A-Za-z0-9]{6}"  # named by mkstemp
    r"|__KMP_REGISTERED_LIB_[0-9]+_[0-9]+)"  # LLVM's OpenMP
)
CLOCK_SLACK_S = 2.0
"""Seconds by which a process's start, counted from the boot, may differ from a file system's clock."""
FOLDER_PREFIX = "megarl-"
OWNER = "megarl_owner.json"
"""File in an engine's temporary folder: its run, and the supervisor that made it."""
LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have."""
_SOCKET = len("/megarl-01234567/01234567-0123-0123-0123-0123456789ab")
_PREFILL_TOKENS = 8192
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for 19 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding takes the cores that trainer ranks run on
}


def engine_process(
    model_path: str,
    rollout: RolloutConfig,
    model: ModelConfig,
    host: str,
    port: int,
    device: Literal["cpu", "cuda"] = "cpu",
    group: tuple[int, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Returns (argv, environment to add) of one engine server that listens on ``host:port``.

    It asks for the job's key on every path: ``$MEGARL_JOB_KEY`` must be in its environment as well.

    Args:
        group: Of an engine that spans ``rollout.nodes`` machines: which part this is, and HOST:PORT where the parts
            meet. Part 0 is the server.
    """
    context = context_tokens(rollout)
    argv = [sys.executable, "-m", "megarl.rollout.server" if group is None or group[0] == 0 else "megarl.rollout.part"]
    argv += ["--model", model_path, "--served-model-name", "policy", "--host", host, "--port", str(port)]
    argv += ["--dtype", model.dtype, "--max-model-len", str(context), "--generation-config", "vllm"]
    if model.head_dtype is not None:
        argv += ["--hf-overrides", json.dumps({"head_dtype": model.head_dtype})]
    argv += ["--max-num-seqs", str(rollout.max_num_seqs), "--block-size", str(rollout.block_size)]
    argv += ["--kv-cache-memory-bytes", str(rollout.kv_cache_bytes)]
    argv += ["--tensor-parallel-size", str(rollout.tp), "--pipeline-parallel-size", str(rollout.pp)]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-log-stats"]
    argv += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    argv += ["--middleware", "megarl.rollout.auth.RequireKey"]
    argv += ["--weight-transfer-config", json.dumps({"backend": PLUGIN})]
    argv += ["--worker-extension-cls", "megarl.sync.receiver.WorkerExtension"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": str(rollout.num_threads),
    }
    if group is not None:
        part, (meeting, _, meeting_port) = group[0], group[1].rpartition(":")
        argv += [
            "--nnodes",
            str(rollout.nodes),
            "--node-rank",
            str(part),
            "--master-addr",
            meeting,
            "--master-port",
            meeting_port,
        ]
        argv += ["--distributed-executor-backend", "mp"]
    if rollout.expert_parallel:
        argv += ["--enable-expert-parallel"]
    if device == "cpu":
        environment |= _CPU_ENVIRONMENT
        argv += _cpu_options(model_path, rollout)
        # A seeded request whose prefill is cut in two kills the engine on CPU ("CPU Generator does not use offset").
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _PREFILL_TOKENS))]
        if rollout.tp * rollout.pp == 1:
            # One process fewer: 8 s of imports, 0.5 GB and a hop a step. vLLM keeps a worker process on CPU only to set
            # its OpenMP environment, which is set above; this variable is its way to be told so.
            argv += ["--distributed-executor-backend", "uni"]
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        # Others permute the experts' weights for their kernels (on Blackwell it would choose one): they could not be
        # read back.
        argv += ["--moe-backend", "triton"]
    return argv, environment


def own_folder(run_dir: Path | None = None) -> tuple[Path, dict[str, str]]:
    """A new folder for what one engine keeps in temporary files, and the environment that says so: vLLM leaves its
    sockets behind.

    It names its run, whose next start removes it (``remove_stale_folders``) when the supervisor and its reaper were
    killed.
    """
    shared = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_folder_root())
    owner = {
        "run_dir": None if run_dir is None else str(run_dir.resolve()),
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()),
    }
    Path(folder, OWNER).write_text(json.dumps(owner))
    environment = {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}
    if (
        "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    ):  # what torch has compiled is for later engines too: where it lies without us
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # one who has no name
            user = f"uid_{os.getuid()}"
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(shared, f"torchinductor_{user}")
    return Path(folder), environment


def _folder_root() -> str:
    shared = tempfile.gettempdir()
    return shared if len(os.fsencode(shared)) + _SOCKET <= LONGEST_SOCKET else "/tmp"


def remove_stale_folders(run_dir: Path) -> list[Path]:
    """Remove the folders that earlier starts of a run have left on this machine; returns those. One that a living
    process uses stays."""
    removed = []
    for folder in Path(_folder_root()).glob(f"{FOLDER_PREFIX}*"):
        try:
            owner = json.loads((folder / OWNER).read_text())
            of_run, pid, start = owner["run_dir"] == str(run_dir.resolve()), int(owner["pid"]), owner["start"]
        except (OSError, ValueError, LookupError, TypeError):  # another program's, another user's, or just being made
            continue
        if of_run and start_ticks(pid) != start and not _used(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _used(folder: Path) -> bool:
    """A process has it as its temporary folder, an engine's workers and what they have started among them."""
    variable = b"TMPDIR=" + os.fsencode(folder)
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ends just now, or is another user's, who cannot use the folder
            if variable in environment.read_bytes().split(b"\0"):
                return True
    return False


def _cpu_options(model_path: str, rollout: RolloutConfig) -> list[str]:
    """Options with which vLLM 0.32.0's CPU build computes correctly."""
    compilation: dict[str, Any] = {}
    options: list[str] = []
    if rollout.pp == 1:
        options += ["--enforce-eager"]
    else:
        # A later stage makes its input buffers while it warms up, which eager mode leaves out; nothing is compiled
        # either way.
        compilation |= {"mode": 1, "custom_ops": ["all"]}
    if _is_mla(model_path):
        # Its rotary kernel rotates the first head of latent attention's queries only. On machines with AMX vLLM would
        # choose another backend, whose projection cannot be loaded a second time.
        compilation.setdefault("custom_ops", []).append("-rotary_embedding")
        options += ["--attention-backend", "CPU_MLA"]
    return [*options, "--compilation-config", json.dumps(compilation)] if compilation else options


def _is_mla(model_path: str) -> bool:
    from megarl.checkpoint.hf_source import read_hf_config  # imports torch and transformers

    path = Path(model_path)
    return (path / "config.json").is_file() and read_hf_config(path).get("kv_lora_rank") is not None


def last_lines(log: Path, count: int = 25, limit: int = 65536) -> str:
    """The last ``count`` non-empty lines of a log, read from its last ``limit`` bytes; they go into error messages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        return f"(no log at {log}: {error.strerror})"
    return "\n".join(lines[-count:])


def shared_memory(group: int) -> set[Path]:
    """Segments in /dev/shm that the processes of a group have made and mapped; with tp > 1 vLLM leaves some behind.

    A model, an environment or a run directory may lie in /dev/shm too and be mapped: only regular files directly in it
    count, of this user, no older than the group and named as the libraries of ``_SEGMENT`` name theirs.
    """
    members = group_members(group)
    since = min(filter(None, map(_started_at, members)), default=0.0) - CLOCK_SLACK_S
    segments = set()
    for pid in members:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if _SEGMENT.fullmatch(path) and _made_since(path, since):
                    segments.add(Path(path))
    return segments


def _made_since(path: str, since: float) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_ctime >= since


def _started_at(pid: int) -> float | None:
    """Start of a process, in Unix seconds; None when it is gone."""
    booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    ticks = start_ticks(pid)
    return None if booted is None or ticks is None else int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK")


def start_ticks(pid: int) -> int | None:
    """Start of a process, in clock ticks since the boot, which with ``pid`` names it; None when it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def kill_group(group: int) -> None:
    """SIGKILL to a process group, and to the groups that its processes have made in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for pid in group_members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    """Process ids of a process group and of the session with its number; left out are those of which only a zombie is
    left (Linux)."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The command in parentheses may hold spaces: state, parent, group and session follow the last ")".
                state, _, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                # Of a process that is killed the first thread is a zombie at once; the last one gives back its memory,
                # and only then closes the sockets on which others of the group may have listened.
                if str(group) in numbers and (state != "Z" or len(list((entry / "task").iterdir())) > 1):
                    members.append(int(entry.name))
    return members
