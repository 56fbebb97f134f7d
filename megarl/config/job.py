"""Settings of the job around the training: its directory and ports, its machines, its database, how weights reach the
engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megarl.config.bounds import Bound, Count, NonNegative, Positive, Seconds


@dataclass(frozen=True)
class SyncConfig:
    method: Literal["direct", "checkpoint"] = "direct"
    """Way of the weights from the trainer to engines: over links; or as files in ``<run.dir>/weights``, for explore
    programs that share nothing with the trainer but a file system and the store (docs/modes.md)."""
    bucket_bytes: Annotated[int, Bound(4096)] = 8388608  # smaller ones cost a message for every few numbers
    """Upper bound of one transfer bucket; a sync needs at most two of them on either side."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Carrier of weights to engines: ``gloo``, sockets and host memory; ``nccl``, NCCL and the GPUs' memory, which
    needs ``parallel.backend=nccl`` and was never run on hardware (docs/weight_sync.md)."""
    shared_memory: bool = True
    """Send through shared memory (with ``transport=nccl`` that of the GPU, by CUDA IPC) to engine workers on a trainer
    rank's own machine; False sends everything over ``transport``."""
    timeout_s: Seconds = 120.0
    """Longest wait for the other side within a sync."""
    probe_tokens: Annotated[int, Bound(2, 2**20)] = 16
    """Length of the probe text whose log-probs are compared on both sides after every sync."""
    adapter: Literal["merged", "separate"] = "merged"
    """Way of adapters to engines: ``merged``, in the model's own weights, of which those with an adapter are sent;
    ``separate``, A and B alone, with which vLLM computes beside the model (docs/lora.md)."""
    max_staleness: Annotated[int, Bound(0, 100)] = 0
    """Steps by which the weights that sample may be behind those that are trained: 0 samples and trains in turn; above
    it groups are sampled ahead while the trainer computes (docs/asynchrony.md)."""
    interval: Annotated[int, Bound(1, 101)] = 1
    """Steps from one publication of weights to the next, ``max_staleness`` + 1 at most."""
    order: Literal["admission", "completion"] = "admission"
    """Groups that a step takes: those asked for for it, which is repeatable; or those that ended first, so that no step
    waits for the longest response."""
    deterministic: bool = False
    """Refuse settings with which time decides what is trained, so that no run repeats bit for bit, kills included
    (docs/asynchrony.md). Verifiers, tools and environments must respond alike and within their limits."""
    cold_interval: Count | None = None
    """Steps after which one engine is started again with the weights' files, and must compute what it did with the same
    weights by updates: on CPUs the same bits (docs/weight_sync.md). It takes a start of an engine. None never does."""
    pause: Literal["wait", "keep"] = "wait"
    """Pause of the engines for new weights: ``wait``, all at once, when the running requests have ended; ``keep``, one
    engine after another, whose running requests go on with the new weights (docs/asynchrony.md)."""
    probe_tolerance: Positive | None = None
    """Largest log-prob difference that the probe text may show, and largest mean of those of tokens decoded after it,
    in multiples of max(1, |log-prob|); None takes 1e-4 for float32 and 0.05 for bfloat16."""
    sample_tolerance: Positive | None = None
    """Largest mean log-prob difference of what a step's own weights have sampled, engine against trainer. None takes
    1e-3 for float32 and 0.1 for bfloat16."""


@dataclass(frozen=True)
class StoreConfig:
    url: str = "sqlite:///${run.dir}/store.db"
    """A file on this machine, postgresql://USER@HOST/DATABASE, ``env://NAME`` (the URL is in that environment
    variable), or
    ``job://postgres``: a server of the job's own. Without a password; docs/store.md."""
    folder: str = ""
    """Folder on a local disk of the first node for the data of ``store.url=job://postgres``; empty takes ``run.dir``
    where that is local, else $SLURM_TMPDIR, $TMPDIR or /tmp (docs/store.md)."""
    poll_s: Annotated[float, Bound(0, 60, above=True)] = 0.02
    """Pause between two looks into the database while waiting."""
    outage_s: Annotated[float, Bound(0, 86400)] = 300.0
    """Seconds for which each process waits for a database that does not answer, before the job ends."""


@dataclass(frozen=True)
class ClusterConfig:
    """Several machines (docs/cluster.md). The launcher, Slurm or torchrun, chooses them."""

    connect_timeout_s: Seconds = 300.0
    """Seconds for which the head waits for the other nodes, and they for it."""
    heartbeat_s: Annotated[float, Bound(1, 3600)] = 30.0
    """Silence after which a node counts as lost; that of an explorer after which its groups are free to others."""
    stall_s: Annotated[float, Bound(1, 86400)] = 300.0
    """Seconds for which trainer ranks, the explorer or an engine may show no progress. Then the job reports where each
    process is, and ends the one that the others wait for. A process that starts has ``rollout.start_timeout_s``."""
    restarts: Annotated[int, Bound(0, 1000)] = 0
    """Number of times that a job starts again from its newest checkpoint, in the same allocation, after a process or a
    node has died."""
    replacements: Annotated[int, Bound(0, 1000)] = 3
    """Number of dead engines, explorers and reward hosts that are started again between two steps; 0 for none: their
    death ends the attempt."""
    spare_nodes: Annotated[int, Bound(0, 1000)] = 0
    """Nodes of the allocation that stand by: one takes the place of a node that is lost, or not well at the start."""
    shrink: bool = True
    """Go on with fewer data-parallel ranks and engines where nodes are missing and no spare is left. False keeps the
    size, with more ranks on each node that is left; where they do not spread evenly the job ends."""
    allow_idle: bool = False
    """Start a job that leaves more than a quarter of its GPUs idle (docs/cluster.md)."""
    exclude_unhealthy: bool = False
    """Go on without nodes that differ or lack something, if the rest are enough."""
    max_clock_skew_s: Seconds = 5.0
    """Largest difference between two nodes' clocks at the start."""
    device_bytes: Count | None = None
    """Memory of a device for models, and for engines: a job of which a phase needs more is refused before its start;
    null does not ask. Activations and what libraries take come beside it (docs/roles.md)."""
    host_bytes: Count | None = None
    """Memory of a node for what ``offload=memory`` takes from its devices, refused alike."""
    min_free_disk_bytes: NonNegative = 1073741824
    """Free disk for temporary files, on every node."""


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """Name of the run, and of its directory."""
    dir: str = "runs/${run.name}"
    """Directory of the run: checkpoints, store, logs, report."""
    mode: Literal["both", "explore", "train", "bench"] = "both"
    """Part of the run that this command starts: both, the engines and their explorer (``megarl explore``), or the
    trainer ranks alone (docs/modes.md). ``bench`` is set by ``megarl bench``."""
    number: Annotated[int, Bound(0, 9999)] = 0
    """Number of this explore program among those of the run: each has its own (``megarl explore --number 1``)."""
    host: str = "127.0.0.1"
    """Address that engines and trainer ranks of one machine listen on."""
    port: Annotated[int, Bound(1024, 65535)] | None = None
    """First of the job's ports (engines, rendezvous); None lets the machine choose free ones."""
    fork_servers: bool = True
    """Fork engines and trainer ranks of one machine without GPUs from processes that import what they need while the
    job is checked; false starts each by itself."""
    allow_changes: list[str] = field(default_factory=list)
    """Settings, or groups of them such as trainer.optimizer, that change the training and may differ from the run's
    last start (docs/checkpoints.md)."""
    shutdown_grace_s: Seconds = 20.0
    """Seconds from a request to stop until all is ended, checkpoint or not: as long as a step and its checkpoint take,
    and models that are away need to come back. The scripts of slurm/ set 150; their signal comes 180 s before the
    time limit."""
