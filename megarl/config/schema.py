"""Every setting of megarl, once; those of rewards are in ``rewards.py``, those of tasks in ``taskset.py``, those of the
buffer in ``buffer.py``, those of the job around the training in ``job.py``. YAML files under ``configs/`` only set
values of these frozen dataclasses.

Units are in the names (``_s`` seconds, ``_bytes``, ``_tokens``); a field's docstring is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.bounds import (
    Bound,
    Coefficient,
    Count,
    NonNegative,
    Ranks,
    RewardWeight,
    Seconds,
    Seed,
    Temperature,
    Threads,
    UnitInterval,
)
from megarl.config.buffer import BufferConfig
from megarl.config.job import ClusterConfig, RunConfig, StoreConfig, SyncConfig
from megarl.config.lora import LoraConfig
from megarl.config.rewards import RewardConfig
from megarl.config.taskset import TasksetConfig


@dataclass(frozen=True)
class VisionTowerConfig:
    """Vision tower of a model from scratch of model_type=qwen2_5_vl; other families have none."""

    depth: Count = 2
    """Layers."""
    hidden_size: Count = 64
    """Width; a multiple of 4 times ``num_heads``."""
    intermediate_size: Count = 128
    """Width of the MLP."""
    num_heads: Count = 2
    """Attention heads."""
    patch_size: Annotated[int, Bound(1, 64)] = 7
    """Width and height of a patch in pixels."""
    spatial_merge_size: Annotated[int, Bound(1, 8)] = 2
    """Patches in each direction that become one image token."""
    window_size: Count = 28
    """Width and height in pixels of the windows of attention, a multiple of ``patch_size`` * ``spatial_merge_size``."""
    full_attention_every: Count = 2
    """Every so many layers attention sees the whole image; in the others a window."""
    max_image_tokens: Annotated[int, Bound(1, 16384)] = 16
    """Most tokens of an image; the processor makes larger images smaller."""


@dataclass(frozen=True)
class FromScratchConfig:
    """A randomly initialised HF checkpoint, written to ``model.path`` when that does not exist."""

    model_type: str = "qwen3"
    """A family of megarl's (docs/adding_a_model.md)."""
    vocab_size: Count = 128
    """Tokens of the tokenizer that is made with it."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    intermediate_size: Count = 384
    """Width of the MLP."""
    num_hidden_layers: Count = 4
    """Layers."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count = 2
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: Count = 32
    """Width of one head."""
    max_position_embeddings: Count = 256
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = False
    """True if the LM head shares its weights with the embedding."""
    initializer_range: Annotated[float, Bound(0, 10, above=True)] = 0.05
    """Standard deviation of the initial weights."""
    vision: VisionTowerConfig = field(default_factory=VisionTowerConfig)
    """Vision tower, with model_type=qwen2_5_vl."""

    @property
    def sees(self) -> bool:
        """True if the model has a vision tower."""
        return self.model_type == "qwen2_5_vl"


@dataclass(frozen=True)
class RouterConfig:
    """Balance of the experts of trained models (docs/algorithms.md); all 0 leaves routers to the loss alone."""

    aux_loss_coef: Coefficient = 0.0
    """Coefficient of the balance loss of each sequence (DeepSeek-V3), as a mean over an update's sequences; added for
    every layer."""
    z_loss_coef: Coefficient = 0.0
    """Coefficient of the mean over an update's tokens of the squared logsumexp of the router's logits (ST-MoE); added
    for every layer."""
    bias_update_rate: Coefficient = 0.0
    """Step by which an update moves the bias of each expert towards an even load; for models whose routers have biases
    (DeepSeek-V3)."""

    @property
    def is_used(self) -> bool:
        """True if a setting differs from 0."""
        return bool(self.aux_loss_coef or self.z_loss_coef or self.bias_update_rate)


RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"]
"""Part of a layer that Megatron-Core can compute again by itself."""


Fusion = Literal["gradient_accumulation_fusion", "moe_permute_fusion"]
"""Fused kernel that Megatron-Core takes from another package."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = "???"
    """HF checkpoint directory (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of trainer and engine; masters and optimizer state are float32 in either case."""
    head_dtype: Literal["float32"] | None = None
    """Compute type of the LM head in trainer and engine; null takes ``dtype``. float32 with bfloat16 weights: log-probs
    of both sides are closer, logits take twice the bytes."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Megatron-Core's own layers, or TransformerEngine's (needs a GPU)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of kept: none, those of ``recompute_modules``,
    whole layers."""
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: ["core_attn"])
    """Megatron's names of the parts of a layer that ``recompute=selective`` computes again, in models that have them
    (docs/tuning.md)."""
    fusions: list[Fusion] = field(default_factory=list)
    """Megatron's names of fused kernels for training, which need packages on GPUs (docs/tuning.md)."""
    moe_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """Exchange of tokens between the trainer's ranks that share experts: torch's all-to-all, or DeepEP's kernels, which
    need its package on GPUs, bfloat16 and routers in float32 (docs/tuning.md)."""
    router_dtype: Literal["float32"] | None = None
    """Compute type of the trainer's routers, whose weights keep ``dtype``; null takes the family's: float32 of
    DeepSeek-V3, else ``dtype``. Engines compute logits of theirs in ``dtype``."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Balance of experts."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters in place of the model's own weights."""
    train_vision_tower: bool = False
    """True trains the vision tower of a vision-language model too; False leaves it as it is."""
    min_image_pixels: Count | None = None
    """Fewest pixels that trainer and engines resize an image of a vision-language model to; null takes the limit of the
    model's own processor."""
    max_image_pixels: Count | None = None
    """Most pixels that trainer and engines resize an image of a vision-language model to; null takes the limit of the
    model's own processor. A vector of the image, and so a token, is for 28 x 28 pixels in Qwen2.5-VL."""
    from_scratch: FromScratchConfig | None = None
    """A new model instead of a published one; null expects a checkpoint at ``model.path``."""


@dataclass(frozen=True)
class GridSizes:
    """Ranks of Megatron's grid in each direction, and which layers its stages have."""

    tp: Ranks = 1
    """Tensor-parallel ranks: each has a slice of every layer."""
    pp: Ranks = 1
    """Pipeline stages: each has some of the layers."""
    dp: Ranks = 1
    """Data-parallel ranks: each trains sequences of its own."""
    cp: Ranks = 1
    """Context parallel: ranks that share each sequence, every one a part of its tokens."""
    ep: Ranks = 1
    """Ranks that the experts of a layer are dealt to; etp * ep divides the ranks of a stage."""
    etp: Ranks | None = None
    """Tensor parallel size of an expert; None takes ``tp`` when ``ep`` is 1, and 1 otherwise."""
    vpp: Count = 1
    """Model chunks of a pipeline stage (interleaved schedule); above 1 only with ``pp`` above 1."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage where it has another number than the rest."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage where it has another number than the rest."""

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.stage_size * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.ep == 1 else 1


@dataclass(frozen=True)
class ParallelConfig(GridSizes):
    """A model's grid; world size = tp * cp * dp * pp. Experts lie otherwise on the same ranks of a stage."""

    sequence_parallel: bool = False
    """Share norms and dropout along the sequence among the ``tp`` ranks (Megatron's sequence parallelism): less
    activation memory."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass of the last micro-batch goes on (Megatron's
    --overlap-grad-reduce). For models that are trained."""
    overlap_param_gather: bool = False
    """Gather updated parameters bucket by bucket while the forward pass of a step's next update goes on (Megatron's
    --overlap-param-gather). Needs ``overlap_grad_reduce``."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: everything on CPUs. nccl: every trainer rank and engine worker on a GPU of its own (docs/hardware.md:
    what has run there)."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: UnitInterval = 1e-6  # 0 is a control experiment
    """Peak learning rate."""
    min_lr: UnitInterval | None = None
    """End of the decay; None keeps ``lr``."""
    warmup_steps: NonNegative = 0
    """Trainer steps, all updates of which have one learning rate; the actor's begin after ``critic.warmup_steps``."""
    decay_steps: Count | None = None
    """Trainer step, counted from the start, at which a linear decay ends at ``min_lr``; null keeps ``lr``."""
    weight_decay: Annotated[float, Bound(0, 100)] = 0.01
    """AdamW's decoupled weight decay; norms and biases have none."""
    beta1: Annotated[float, Bound(0, 1, below=True)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Bound(0, 1, below=True)] = 0.95
    """Decay of AdamW's second moment; verl and torch have 0.999."""
    eps: Annotated[float, Bound(0, 1, above=True)] = 1e-8
    """AdamW's epsilon."""
    clip_grad: Coefficient = 1.0
    """Largest gradient norm of an update; 0 does not clip."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps before reinforcement learning, through the same trainer."""

    steps: NonNegative = 0
    """Supervised steps; 0 for none."""
    batch_size: Count = 128
    """Rows of a step."""
    checkpoint_interval: Count = 100
    """Steps between two checkpoints; those of the warm start are removed once a later one counts."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the warm start alone; its moments are forgotten afterwards."""


@dataclass(frozen=True)
class UpdateFilterConfig:
    """Treatment of harmful optimizer updates of actor or critic (docs/algorithms.md)."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "skip"
    """Treatment of an update whose loss or gradient norm is NaN or infinite: the job ends; the update is left out; or
    the run goes back to its newest checkpoint and on with other tasks."""
    spike_factor: Annotated[float, Bound(1, above=True)] | None = None
    """A norm above so many times the median of the last ``spike_window`` updates of that model is a spike; None looks
    for none."""
    spike_window: Annotated[int, Bound(2, 10**6)] = 50
    """Updates over which the median is taken."""
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    """Treatment of an update with a spike."""
    max_bad_steps: Count = 5
    """The job ends at so many steps in a row with such an update."""


Offload = Literal["none", "memory", "disk"]
"""Place of a model's memory in the phases that do not need it: it stays, goes to host memory or to a file."""


@dataclass(frozen=True)
class TrainerConfig:
    steps: Count = 100
    """Reinforcement-learning steps: one rollout each. (Offline: steps on rows of a file.)"""
    tasks_per_step: Count = 64
    """Tasks of a rollout. (Offline: rows of a step.)"""
    updates_per_step: Count = 1
    """Optimizer updates that share one rollout (verl's mini-batches)."""
    ppo_epochs: Count = 1
    """Passes over a rollout, each of the same ``updates_per_step`` updates in the same order."""
    packing: bool = True
    """Sequences one after the other in chunks of at most ``max_tokens_per_micro_batch``; False pads each to the
    longest."""
    max_tokens_per_micro_batch: Count = 8192
    """Tokens per forward and backward pass on one data-parallel rank (the ranks of ``parallel.cp`` share them)."""
    max_patches_per_micro_batch: Count | None = None
    """With packing: most patches of images per forward and backward pass on one data-parallel rank, those of each
    sequence counted; null is no limit. Bounds the memory of the vision tower (docs/vision.md)."""
    micro_batch_size: Count = 128
    """Without packing: rows per forward and backward pass on one data-parallel rank."""
    checkpoint_interval: Count = 20
    """Steps between two checkpoints; the last step always has one."""
    keep_checkpoints: Count = 2
    """Finished checkpoints that are kept, the newest first."""
    keep_best: str | None = None
    """Metric of held-out evaluations (``val/accuracy``, ``val/loss``) whose best checkpoint is kept beside the newest;
    ``run:DIR@best`` names it (docs/checkpoints.md). The least value of a loss is the best, else the largest."""
    async_checkpoint: bool = True
    """Training goes on while a forked process of each rank writes a checkpoint; it counts when all have written. What
    ends a job is written at once."""
    verify_checkpoints: bool = True
    """Compare every byte of a checkpoint with its manifest's digests before a job resumes from it, or starts from a
    converted model; False compares sizes alone."""
    max_failed_checkpoints: Count = 3
    """A checkpoint between two steps for which the disk has no room is left out, with a warning; the job ends at so
    many in a row."""
    eval_interval: NonNegative = 0
    """Held-out accuracy (offline: loss) every N steps; 0 means before and after only."""
    eval_engines: NonNegative = 0
    """Engines that an evaluation between steps has for itself, while training goes on with the others; 0 evaluates with
    all of them and waits. Needs ``sync.pause=keep`` (docs/asynchrony.md)."""
    seed: Seed = 1
    """Seed of task order, of sampling and of torch's generators."""
    num_threads: Threads = 1
    """CPU threads of one trainer rank."""
    logits_bytes: Count | None = None
    """Most bytes of logits on one rank. None keeps a micro-batch's whole; when they are more than this they are
    computed in chunks of rows that fit, and once more in the backward pass."""
    loop: str | None = None
    """Python file with a training loop of your own, ``run(rank)``, in place of megarl's (examples/own_loop.py). For
    jobs that sample."""
    kernels: Literal["megarl", "torch"] = "megarl"
    """Kernels for log-probs, advantages and losses: megarl's, or their plain-torch twins (slower, larger, for
    comparison)."""
    keep_batches: bool = False
    """Write the tokens and loss masks that each step trains on to RUN_DIR/batches, for ``megarl data tokens RUN``
    (docs/data.md). Not in offline jobs."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    """Trackers that get metrics beside ``metrics.jsonl`` and the report (docs/sweeps.md); keys and addresses are in the
    environment."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and learning-rate schedule of the actor."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Supervised steps before the first rollout."""
    update_filter: UpdateFilterConfig = field(default_factory=UpdateFilterConfig)
    """Treatment of harmful updates."""
    offload: Offload = "none"
    """Place of the actor's parameters and optimizer in the phases of a step that do not need them; its gradients are
    dropped there."""
    offload_disk_bytes: Count | None = None
    """Most bytes that one rank may have on disk for ``offload=disk`` of all roles, in RUN_DIR/offload; null for no
    limit."""


WrongEnd = Literal[
    "workflow_error", "workflow_timeout", "tool_timeout", "abandoned", "environment_error", "environment_timeout"
]


KV_CACHE_BYTES = 2**28
"""KV cache of an engine worker where no setting says how much."""


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout engines: ``replicas`` servers of tp * pp workers each."""

    tp: Ranks = 1
    """Tensor-parallel workers of an engine."""
    pp: Ranks = 1
    """Pipeline stages of an engine."""
    expert_parallel: bool = False
    """Whole experts on each of an engine's ``tp`` ranks, instead of a share of every expert."""
    routing_replay: bool = False
    """Engines record the experts that they choose for each token, and the actor chooses the same
    (docs/algorithms.md)."""
    replicas: Annotated[int, Bound(1, 1024)] = 1
    """Engines."""
    nodes: Ranks = 1
    """Nodes that each engine spans; its tp * pp workers spread evenly over them."""
    placement: Literal["separate", "colocated"] = "separate"
    """Devices of the engines: their own, or those of the trainer ranks, with which they take turns (docs/roles.md)."""
    offload: Literal["sleep", "memory", "destroy"] = "sleep"
    """Colocated engines while the trainer computes: without weights and KV cache, without KV cache and with the weights
    in host memory (jobs with adapters, which change few of them), or ended and started again."""
    max_prompt_tokens: Count | None = None
    """None takes the longest prompt of ``taskset.train`` and ``taskset.eval``, and in a run that has begun the one of
    its start."""
    max_response_tokens: Count = 64
    """Longest response; longer ones are truncated and have finish reason ``length``."""
    segment_tokens: Count | None = None
    """Tokens after which an unfinished response is written to the store, to go on from there after a death
    (docs/asynchrony.md). None writes groups only when they are whole."""
    max_repeats: Annotated[int, Bound(2)] | None = None
    """A response ends after a segment whose last tokens are one sequence so many times in a row, of at most 256 tokens
    (docs/asynchrony.md). None never stops a repetition."""
    budget_tokens: Count | None = None
    """Partial rollouts: tokens after which a trajectory of a later step waits for the next publication of weights, and
    goes on with them. None lets every trajectory end."""
    budget_s: Seconds | None = None
    """The same in seconds since the publication, in place of tokens or beside them: whichever ends first. No run then
    repeats bit for bit."""
    spare: Annotated[int, Bound(0, 1024)] = 0
    """Trajectories sampled beyond ``algorithm.group_size`` for each training group, of which those that end last are
    cut (docs/asynchrony.md). It biases towards short responses, and no run repeats bit for bit."""
    max_trajectory_tokens: Count | None = None
    """Most tokens of a trajectory: its prompt and all turns. None is a prompt and one response."""
    max_images: Annotated[int, Bound(1, 1024)] = 16
    """Most images of a trajectory whose messages have some, its task's included (docs/vision.md)."""
    temperature: Annotated[float, Bound(0.01, 2)] = 1.0  # greedy responses of a group would all be equal
    """Temperature of sampling, and of the log-probs on both sides. vLLM samples below 0.01 as at 0.01, and refuses
    more than 2."""
    max_num_seqs: Count = 512
    """Most sequences that an engine computes at once (vLLM's)."""
    enforce_eager: bool = False
    """Engines on GPUs without torch.compile and captured graphs: they start sooner and sample slower (vLLM's). On CPUs
    they always are."""
    block_size: Annotated[int, Bound(32, 1024, multiple=32)] = 32  # vLLM's CPU attention takes no other
    """Tokens of a block of the KV cache (vLLM's)."""
    kv_cache_bytes: Annotated[int, Bound(2**20)] | None = None
    """KV cache of one engine worker; null is 256 MiB, or what ``gpu_memory_utilization`` leaves where that is set."""
    gpu_memory_utilization: Annotated[float, Bound(0, 1, above=True)] | None = None
    """Share of a GPU's memory that an engine worker takes, its KV cache being what weights and activations leave
    (vLLM's); in place of ``kv_cache_bytes``, on GPUs alone."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the numbers in the KV cache: the model's, or 8 bits, on GPUs alone. The engine's log-probs then differ
    from the trainer's, so ``algorithm.correction``, ``sync.probe_tolerance`` and ``sync.sample_tolerance``
    must be set (docs/tuning.md)."""
    weight_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the engines' linear layers and experts: the model's, or 8 bits, made as weights arrive. Takes
    ``model.dtype=bfloat16``, and the settings that an 8-bit KV cache does. Embeddings, LM head, routers and vision
    towers keep the model's (docs/tuning.md)."""
    engine_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further options of vLLM's engine by their names there, such as ``{max_num_batched_tokens: 16384}``
    (docs/tuning.md). Those that megarl sets, or that its proofs depend on, are refused."""
    num_threads: Threads = 1
    """CPU threads of one engine worker."""
    start_timeout_s: Seconds = 300.0
    """Longest start of an engine until it serves."""
    request_timeout_s: Seconds = 300.0
    """Longest time in which an engine that has samples to compute generates no token, weight updates left out; no limit
    of a response."""
    retries: Annotated[int, Bound(0, 100)] = 2
    """Times that a trajectory begins again, with the same seeds, after an error of its workflow or environment."""
    wrong_ends: list[WrongEnd] = field(default_factory=list, hash=False)
    """Ends that count as a wrong response with score 0, where the policy can have caused them (docs/agents.md)."""
    concurrent_groups: Count = 64
    """Groups the explorers keep in flight."""
    explorers: Annotated[int, Bound(1, 256)] = 1
    """Processes that run workflows, serve agents and claim groups, where one has too much to do. They share
    ``concurrent_groups`` and ``reward.workers``."""
    environment: str = "guess"
    """Environment of ``rollout.workflow=environment``: ``guess``, one of another package, or a Python file of yours
    (docs/environments.md)."""
    environment_threads: Count = 256
    """Most calls of environments at once."""
    environment_timeout_s: Seconds = 300.0
    """Longest call of an environment's ``make``, ``step`` or ``close``."""
    agent: str = ""
    """Agent of ``rollout.workflow=agent``: a Python file with ``run``, or a command line (docs/agents.md)."""
    agent_env: list[str] = field(default_factory=list, hash=False)
    """Names of further environment variables that a command gets; without them it has no keys of yours
    (docs/agents.md)."""
    agent_sandbox: bool = False
    """Commands see the system's programs, the folders of their files and the endpoint, nothing else of their machine
    (docs/agents.md)."""
    agent_paths: list[str] = field(default_factory=list, hash=False)
    """Further files and folders that a command in the sandbox may read."""
    agent_rewards: bool = False
    """The agent returns the reward of every trajectory, so rows need no verifier."""
    agent_timeout_s: Seconds = 3600.0
    """Longest run of an agent."""
    workflow: str = "single_turn"
    """Workflow that makes a trajectory of a task: ``single_turn``, ``reflect``, ``best_of_n``, ``tools``,
    ``environment``, ``agent``, or a Python file of yours (docs/workflows.md)."""
    tools: list[str] = field(default_factory=list, hash=False)
    """Tools of ``rollout.workflow=tools``: ``python``, ``calculator``, and Python files with functions of yours."""
    tool_format: str | None = None
    """Form in which calls are written, for a chat template that writes none: the prompt then has to describe the tools.
    None is the template's own (docs/workflows.md)."""
    max_tool_calls: Count = 16
    """Most tool calls of a trajectory."""
    tool_timeout_s: Seconds = 30.0
    """Longest tool call."""
    on_tool_timeout: Literal["report", "end"] = "report"
    """Consequence of a call of your own function that takes longer: the model gets an error, or the trajectory begins
    again and ends as ``tool_timeout``. Code of the model always gets an error."""
    tool_result_chars: Annotated[int, Bound(64)] = 8192
    """Most characters of a tool's result; more are cut."""
    tool_memory_mib: Annotated[int, Bound(64)] = 1024
    """Memory of a trajectory's Python session."""
    tool_python: str | None = None
    """Interpreter of the tool ``python``, with its packages; None as for ``reward.code.python``."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the environment, of ``best_of_n`` (docs/workflows.md), or of your own workflow, which it is given as
    ``options``."""
    workflow_timeout_s: Seconds = 3600.0
    """Most seconds of a workflow of its own, in which it waits neither for the engine nor for the verifier. An agent
    has ``agent_timeout_s`` instead."""

    @property
    def cache_bytes(self) -> int | None:
        """KV cache of one engine worker in bytes; None where ``gpu_memory_utilization`` decides."""
        if self.kv_cache_bytes is None and self.gpu_memory_utilization is None:
            return KV_CACHE_BYTES
        return self.kv_cache_bytes

    @property
    def is_colocated(self) -> bool:
        """True where engines have devices of trainer ranks, and take turns with them."""
        return self.placement == "colocated"

    @property
    def is_partial(self) -> bool:
        """True for partial rollouts."""
        return self.budget_tokens is not None or self.budget_s is not None


@dataclass(frozen=True)
class EvaluationConfig:
    """Responses to the held-out tasks; ``trainer.eval_interval`` sets how often. One greedy response by default."""

    samples: Count = 1
    """Answers to each task; more than one need a temperature, and give avg@k and pass@k with standard errors."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Bound(0, 1, above=True)] = 1.0
    """Sample from the fewest tokens whose probabilities add up to this; 1 keeps all."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0 keeps all."""
    average: Annotated[float, Bound(0, 1, below=True)] | None = None
    """Evaluate an exponential moving average of the actor with this decay, such as 0.9, and write it to
    RUN_DIR/hf_average; null evaluates the actor. The average is one more float32 copy of each rank's weights."""


@dataclass(frozen=True)
class ReferenceConfig:
    refresh: Literal["never", "every_iteration"] | Count = "never"
    """Moments at which the reference takes the actor's weights: never, at the start of every step, or of every N-th."""
    parallel: ParallelConfig | None = None
    """Its own grid on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Its compute type; null takes the model's."""
    offload: Offload = "none"
    """Place of its parameters in the phases that do not need them."""


@dataclass(frozen=True)
class CriticConfig:
    path: str | None = None
    """HF sequence-classification checkpoint with one label, or a PEFT folder with a score head (``reward_model.path``
    too); None starts from the actor, with a head of zeros."""
    parallel: ParallelConfig | None = None
    """Its own grid on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Its compute type; null takes the model's."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """AdamW and learning-rate schedule of the critic."""
    warmup_steps: NonNegative = 0
    """Steps at the start in which the critic learns alone."""
    offload: Offload = "none"
    """Place of its parameters and optimizer in the phases that do not need them; its gradients are dropped there."""


@dataclass(frozen=True)
class RewardModelConfig:
    path: str | None = None
    """HF sequence-classification checkpoint with one label, or a PEFT folder with a score head; its score of each
    response is added to the reward. None for none."""
    parallel: ParallelConfig | None = None
    """Its own grid on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Its compute type; null takes the model's."""
    coef: RewardWeight = 1.0
    """Factor of its score in the reward."""
    offload: Offload = "none"
    """Place of its parameters in the phases that do not need them."""


@dataclass(frozen=True)
class TeacherConfig:
    """A teacher of on-policy distillation (docs/distillation.md)."""

    path: str = "???"
    """HF checkpoint of a language model with the actor's tokenizer, of any architecture and size."""
    sources: list[str] = field(default_factory=list, hash=False)
    """``data_source`` of the tasks that it teaches: exact names, or prefixes that end in ``/``; an empty list for those
    that no other teacher names."""
    weight: Coefficient = 1.0
    """Factor of its log-ratio in the advantage."""
    parallel: ParallelConfig | None = None
    """Its own grid on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Its compute type; null takes the model's."""
    offload: Offload = "none"
    """Place of its parameters in the phases that do not need them."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict, hash=False)
    """Teachers of ``algorithm=distill`` by name, {NAME: {path: FOLDER, sources: [gsm8k]}} (docs/distillation.md)."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    taskset: TasksetConfig = field(default_factory=TasksetConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
