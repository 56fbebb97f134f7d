"""Settings of the job around the training, and of the buffer between explorer and trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal

from megarl.config.bounds import Bound, Coefficient, Count, NonNegative, Positive, Seconds, UnitInterval


@dataclass(frozen=True)
class SyncConfig:
    method: Literal["direct", "checkpoint"] = "direct"
    """Path of the weights to the engines: over links, or as files in ``<run.dir>/weights``, for explore programs that
    share only a file system and the store with the trainer (docs/modes.md)."""
    bucket_bytes: Annotated[int, Bound(4096)] = 8388608  # smaller ones cost a message for every few numbers
    """Upper bound of one transfer bucket; a sync needs at most two of them on either side."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Carrier of weights to engines: ``gloo`` uses sockets and host memory; ``nccl`` uses NCCL and GPU memory, needs
    ``parallel.backend=nccl`` and was never run on hardware (docs/weight_sync.md)."""
    shared_memory: bool = True
    """Send weights through shared memory (with ``transport=nccl`` GPU memory, by CUDA IPC) to engine workers on the
    same machine; False sends everything over ``transport``."""
    timeout_s: Seconds = 120.0
    """Timeout in seconds of each wait for the other side during a sync."""
    probe_tokens: Annotated[int, Bound(2, 2**20)] = 16
    """Length in tokens of the probe text; its log-probs on both sides are compared after every sync."""
    adapter: Literal["merged", "separate"] = "merged"
    """Form in which engines get adapters: ``merged`` into the model's weights, sending only tensors with an adapter;
    ``separate`` sends A and B, which vLLM applies itself (docs/lora.md)."""
    max_staleness: Annotated[int, Bound(0, 100)] = 0
    """Steps by which the sampling weights may lag behind the trained ones. 0 alternates sampling and training; above 0,
    groups are sampled ahead while the trainer computes (docs/asynchrony.md)."""
    interval: Annotated[int, Bound(1, 101)] = 1
    """Steps from one publication of weights to the next, ``max_staleness`` + 1 at most."""
    order: Literal["admission", "completion"] = "admission"
    """Groups that a step takes: those requested for it, which is repeatable; or those that ended first, so that no step
    waits for the longest response."""
    deterministic: bool = False
    """Refuse settings under which timing decides what is trained, so that every run repeats bit for bit, even after
    kills (docs/asynchrony.md). Verifiers, tools and environments must be deterministic and keep within their limits."""
    cold_interval: Count | None = None
    """Steps between restarts of one engine from weight files. It must compute the same as an engine with the same
    weights by updates: on CPUs the same bits (docs/weight_sync.md). Costs one engine start; None never restarts."""
    pause: Literal["wait", "keep"] = "wait"
    """Pause of the engines for new weights: ``wait`` updates all together when their running requests have ended;
    ``keep`` updates one after another, and running requests go on with the new weights (docs/asynchrony.md)."""
    probe_tolerance: Positive | None = None
    """Largest allowed log-prob difference on the probe text, and largest mean difference on tokens decoded after it, in
    multiples of max(1, |log-prob|); None takes 1e-4 for float32 and 0.05 for bfloat16."""
    sample_tolerance: Positive | None = None
    """Largest mean log-prob difference between engine and trainer on tokens that the step's own weights sampled. None
    takes 1e-3 for float32 and 0.1 for bfloat16."""


@dataclass(frozen=True)
class StoreConfig:
    url: str = "sqlite:///${run.dir}/store.db"
    """Database: a file on this machine, postgresql://USER@HOST/DATABASE, ``env://NAME`` (the URL is in that environment
    variable), or ``job://postgres`` (a server started by the job). Never with a password; see docs/store.md."""
    folder: str = ""
    """Folder on a local disk of the first node for the data of ``store.url=job://postgres``; empty takes ``run.dir`` if
    that is local, else $SLURM_TMPDIR, $TMPDIR or /tmp (docs/store.md)."""
    poll_s: Annotated[float, Bound(0, 60, above=True)] = 0.02
    """Seconds between two polls of the database while waiting."""
    outage_s: Annotated[float, Bound(0, 86400)] = 300.0
    """Seconds for which each process retries an unreachable database before the job ends."""


@dataclass(frozen=True)
class ClusterConfig:
    """Several machines (docs/cluster.md). The launcher, Slurm or torchrun, chooses them."""

    connect_timeout_s: Seconds = 300.0
    """Seconds for which the head node and the other nodes wait for each other."""
    heartbeat_s: Annotated[float, Bound(1, 3600)] = 30.0
    """Heartbeat timeout in seconds: a silent node then counts as lost; a silent explorer's groups can be claimed by
    others."""
    stall_s: Annotated[float, Bound(1, 86400)] = 300.0
    """Seconds without progress after which a trainer rank, the explorer or an engine counts as stalled. The job then
    logs all stacks and ends the process that blocks the others. Starting processes have ``rollout.start_timeout_s``
    instead."""
    restarts: Annotated[int, Bound(0, 1000)] = 0
    """Number of restarts of a job from its newest checkpoint, in the same allocation, after a process or node has
    died. Trainer ranks start again alone where a signal ended one on one machine."""
    replacements: Annotated[int, Bound(0, 1000)] = 3
    """Number of dead engines, explorers and reward hosts that are restarted between two steps. With 0 their death ends
    the attempt."""
    spare_nodes: Annotated[int, Bound(0, 1000)] = 0
    """Standby nodes of the allocation; each replaces a node that is lost, or unhealthy at the start."""
    shrink: bool = True
    """Go on with fewer data-parallel ranks and engines if nodes are missing and no spare is left. False keeps the
    number of ranks, with more on each remaining node; if they do not spread evenly the job ends."""
    on_notice: Literal["wait", "go_on"] = "wait"
    """Reaction to SIGTERM at a node other than the first. ``wait`` saves and ends with status 130, and Slurm queues the
    job again. ``go_on`` saves and starts again on the other nodes; a node without trainer ranks drains."""
    allow_idle: bool = False
    """Start a job that leaves more than a quarter of its GPUs idle (docs/cluster.md)."""
    exclude_unhealthy: bool = False
    """Go on without nodes that differ from the rest or lack something, if enough nodes remain."""
    max_clock_skew_s: Seconds = 5.0
    """Largest difference between two nodes' clocks at the start."""
    device_bytes: Count | None = None
    """Bytes of device memory for models and engines; a job with a phase that needs more is refused before its start.
    null skips the check. Activations and memory of libraries are not counted (docs/roles.md)."""
    host_bytes: Count | None = None
    """Bytes of host memory per node for models with ``offload=memory``; a job that needs more is refused. null skips
    the check."""
    min_free_disk_bytes: NonNegative = 1073741824
    """Least free bytes on disk for temporary files on every node."""


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """Name of the run, and of its directory."""
    dir: str = "runs/${run.name}"
    """Directory of the run: checkpoints, store, logs, report."""
    mode: Literal["both", "explore", "train", "bench"] = "both"
    """Part of the run that this command starts: ``both``, the engines and their explorer (``explore``), or the trainer
    ranks (``train``); see docs/modes.md. ``bench`` is set by ``megarl bench``."""
    number: Annotated[int, Bound(0, 9999)] = 0
    """Number of this explore program, unique within the run (``megarl explore --number 1``)."""
    host: str = "127.0.0.1"
    """Address that engines and trainer ranks of one machine listen on."""
    port: Annotated[int, Bound(1024, 65535)] | None = None
    """First of the job's ports (engines, rendezvous); None lets the machine choose free ones."""
    fork_servers: bool = True
    """Fork engines and trainer ranks of one machine without GPUs from processes that import libraries while the job is
    checked; False starts each process separately."""
    allow_changes: list[str] = field(default_factory=list)
    """Settings, or groups such as trainer.optimizer, that may differ from the run's last start although they change the
    training (docs/checkpoints.md)."""
    shutdown_grace_s: Seconds = 20.0
    """Seconds from a stop request to a forced end, with or without a checkpoint: set it to the time of a step, its
    checkpoint and the return of offloaded models. The scripts of slurm/ set 150; their signal comes 180 s before the
    time limit."""


@dataclass(frozen=True)
class ReplayConfig:
    """Groups that a step trains on again (docs/algorithms.md)."""

    share: Annotated[float, Bound(0, 1, below=True)] = 0.0
    """Share of a step's ``trainer.tasks_per_step`` groups that are replayed, rounded down to whole groups; the step
    samples that many fewer. 0 replays none."""
    uses: Annotated[int, Bound(2, 1000)] = 2
    """Most steps that train on a group, including the first."""
    max_age: Count = 10
    """Most steps from a group's first use to its last."""
    decay: Annotated[float, Bound(0, 1, above=True)] = 0.9
    """Factor of a group's priority for each step since its first use; 1 ignores age."""
    hardness: Coefficient = 0.0
    """Exponent of a group's share of wrong responses in its priority: 0 ignores it, 1 is in proportion to it. Above 0,
    groups with only right responses are never replayed."""
    min_accuracy: UnitInterval = 0.0
    """Least share of right responses of a replayed group; a value above 0 leaves out groups with only wrong
    responses."""
    max_accuracy: UnitInterval = 1.0
    """Largest share of right responses of a replayed group; a value below 1 leaves out groups with only right
    responses."""

    def num_groups(self, tasks_per_step: int) -> int:
        """Return the number of replayed groups of a step, computed exactly from the decimals of ``share``."""
        return int(Fraction(str(self.share)) * tasks_per_step)


@dataclass(frozen=True)
class BufferConfig:
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Groups that a step trains on again."""
    operators: dict[str, Any] = field(default_factory=dict, hash=False)
    """Operators applied to whole groups before training, in this order: NAME -> its settings, e.g. {duplicates: {},
    length: {max_tokens: 512}, mine: {file: mine.py}} (docs/operators.md)."""
    min_members: Count = 2
    """Fewest members that a group must keep, after operators and ``reward.on_error=mask`` exclude some, to be trained
    on."""
