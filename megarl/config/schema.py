"""Every setting of megarl, once. Rewards are in ``rewards.py``, tasks in ``taskset.py``, the buffer in ``job.py``,
the job around the training in ``job.py``. YAML files under ``configs/`` only set values of these frozen dataclasses.

Units are in the names (``_s`` seconds, ``_bytes``, ``_tokens``); a field's docstring is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megarl.config.alarms import AlarmsConfig
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
from megarl.config.job import BufferConfig, ClusterConfig, RunConfig, StoreConfig, SyncConfig
from megarl.config.lora import LoraConfig
from megarl.config.rewards import RewardConfig
from megarl.config.taskset import TasksetConfig


@dataclass(frozen=True)
class VisionTowerConfig:
    """Vision tower of a new model with model_type=qwen2_5_vl, qwen3_vl or qwen3_5."""

    depth: Count = 2
    """Layers of the vision tower."""
    hidden_size: Count = 64
    """Width of the vision tower; a multiple of 4 times ``num_heads``."""
    intermediate_size: Count = 128
    """Width of the vision tower's MLP."""
    num_heads: Count = 2
    """Attention heads of the vision tower."""
    patch_size: Annotated[int, Bound(1, 64)] = 7
    """Width and height of a patch in pixels."""
    spatial_merge_size: Annotated[int, Bound(1, 8)] = 2
    """Patches in each direction that become one image token."""
    window_size: Count = 28
    """Width and height in pixels of the attention windows, a multiple of ``patch_size`` * ``spatial_merge_size``;
    qwen2_5_vl only."""
    full_attention_every: Count = 2
    """Interval of layers whose attention sees the whole image; other layers see a window. qwen2_5_vl only."""
    max_image_tokens: Annotated[int, Bound(1, 16384)] = 16
    """Most tokens of an image; the processor shrinks larger images."""


@dataclass(frozen=True)
class FromScratchConfig:
    """A randomly initialised HF checkpoint, written to ``model.path`` if that does not exist."""

    model_type: str = "qwen3"
    """Model family of megarl (docs/adding_a_model.md)."""
    vocab_size: Count = 128
    """Tokens of the tokenizer made with the model."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    intermediate_size: Count = 384
    """Width of the MLP."""
    num_hidden_layers: Count = 4
    """Number of layers."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count = 2
    """Key and value heads; fewer than query heads gives grouped-query attention."""
    head_dim: Count = 32
    """Width of one head."""
    max_position_embeddings: Count = 256
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = False
    """True if the LM head shares its weights with the embedding."""
    initializer_range: Annotated[float, Bound(0, 10, above=True)] = 0.05
    """Standard deviation of the initial weights."""
    vision: VisionTowerConfig = field(default_factory=VisionTowerConfig)
    """Vision tower, with model_type=qwen2_5_vl, qwen3_vl or qwen3_5."""

    @property
    def sees(self) -> bool:
        """True if the model has a vision tower."""
        return self.model_type in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@dataclass(frozen=True)
class RouterConfig:
    """Balance of the experts of trained models (docs/algorithms.md); with all 0, only the loss trains routers."""

    aux_loss_coef: Coefficient = 0.0
    """Coefficient of the per-sequence balance loss (DeepSeek-V3), averaged over an update's sequences and added for
    every layer."""
    z_loss_coef: Coefficient = 0.0
    """Coefficient of the router z-loss (ST-MoE): squared logsumexp of the router's logits, averaged over an update's
    tokens and added for every layer."""
    bias_update_rate: Coefficient = 0.0
    """Step of each expert's bias per update, towards an even load; for routers with biases (DeepSeek-V3)."""

    @property
    def is_used(self) -> bool:
        """True if a setting differs from 0."""
        return bool(self.aux_loss_coef or self.z_loss_coef or self.bias_update_rate)


RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"]
"""Part of a layer that Megatron-Core can recompute separately."""


Fusion = Literal["gradient_accumulation_fusion", "moe_permute_fusion"]
"""Fused kernel that Megatron-Core takes from another package."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = "???"
    """HF checkpoint directory (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of trainer and engine; master weights are always float32."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the gradients of trained models are kept, added over micro-batches and reduced over data-parallel
    ranks; bfloat16 needs ``dtype=bfloat16`` and halves their bytes and messages (docs/tuning.md)."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the optimizers of trained models keep AdamW's two moments; it computes in float32. On GPUs bfloat16
    needs TransformerEngine's FusedAdam (docs/tuning.md)."""
    fp8: Literal["tensorwise", "blockwise"] | None = None
    """Scales of linear layers that compute in 8 bits, by Megatron's names of recipes; null computes in ``dtype``. Needs
    TransformerEngine's layers, bfloat16 and a dense model (docs/tuning.md)."""
    head_dtype: Literal["float32"] | None = None
    """Compute type of the LM head in trainer and engine; null takes ``dtype``. With bfloat16 weights, float32 brings
    the log-probs of both sides closer and doubles the bytes of logits."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Layers: Megatron-Core's, or TransformerEngine's (needs a GPU)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass instead of kept: none, those of ``recompute_modules``, or whole
    layers."""
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: ["core_attn"])
    """Parts of a layer, by Megatron's names, that ``recompute=selective`` recomputes in models that have them
    (docs/tuning.md)."""
    fusions: list[Fusion] = field(default_factory=list)
    """Fused kernels for training, by Megatron's names; they need packages on GPUs (docs/tuning.md)."""
    moe_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """Exchange of tokens between the trainer's ranks that share experts: torch's all-to-all, or DeepEP's kernels, which
    need its package on GPUs, bfloat16 and routers in float32 (docs/tuning.md)."""
    router_dtype: Literal["float32"] | None = None
    """Compute type of the trainer's routers, whose weights keep ``dtype``; null takes the family's: float32 for
    DeepSeek-V3, else ``dtype``. Engines compute router logits in ``dtype``."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Balance of experts."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters trained in place of the model's weights."""
    train_vision_tower: bool = False
    """True trains the vision tower of a vision-language model too; False freezes it."""
    min_image_pixels: Count | None = None
    """Fewest pixels that trainer and engines resize an image of a vision-language model to; null takes the limit of the
    model's processor."""
    max_image_pixels: Count | None = None
    """Most pixels that trainer and engines resize an image of a vision-language model to; null takes the limit of the
    model's processor. Qwen2.5-VL has one image token per 28 x 28 pixels."""
    from_scratch: FromScratchConfig | None = None
    """A new model instead of a published one; null expects a checkpoint at ``model.path``."""


@dataclass(frozen=True)
class GridSizes:
    """Sizes of Megatron's grid in each direction, and layers of its pipeline stages."""

    tp: Ranks = 1
    """Tensor-parallel ranks: each has a slice of every layer."""
    pp: Ranks = 1
    """Pipeline stages: each has some of the layers."""
    dp: Ranks = 1
    """Data-parallel ranks: each trains different sequences."""
    cp: Ranks = 1
    """Context-parallel ranks: they share each sequence, and each has a part of its tokens."""
    ep: Ranks = 1
    """Expert-parallel ranks, which share the experts of a layer; etp * ep must divide the ranks of a stage."""
    etp: Ranks | None = None
    """Tensor parallel size of an expert; None takes ``tp`` if ``ep`` is 1, else 1."""
    vpp: Count = 1
    """Model chunks of a pipeline stage (interleaved schedule); above 1 only with ``pp`` above 1."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, if different from the rest."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, if different from the rest."""

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
    """A model's grid; world size = tp * cp * dp * pp. Experts are laid out differently on the same ranks of a stage."""

    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over the ``tp`` ranks (Megatron's sequence parallelism), which saves
    activation memory."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass of the last micro-batch goes on (Megatron's
    --overlap-grad-reduce). For trained models only."""
    overlap_param_gather: bool = False
    """Gather updated parameters bucket by bucket while the forward pass of a step's next update goes on (Megatron's
    --overlap-param-gather). Needs ``overlap_grad_reduce``."""
    overlap_p2p: bool = False
    """Send and receive between pipeline stages while the stages compute (Megatron's overlap_p2p_comm). Needs ``vpp``
    above 1."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Backend: gloo runs everything on CPUs; nccl gives every trainer rank and engine worker a separate GPU
    (docs/hardware.md: what has run there)."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: UnitInterval = 1e-6  # 0 is a control experiment
    """Peak learning rate."""
    min_lr: UnitInterval | None = None
    """Learning rate at the end of the decay; None keeps ``lr``."""
    warmup_steps: NonNegative = 0
    """Trainer steps of linear warm-up; all updates of a step have one learning rate. The actor's warm-up begins after
    ``critic.warmup_steps``."""
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
    """Supervised steps before reinforcement learning, with the same trainer."""

    steps: NonNegative = 0
    """Supervised steps before reinforcement learning; 0 for none."""
    batch_size: Count = 128
    """Rows of a warm-start step."""
    checkpoint_interval: Count = 100
    """Steps between two checkpoints; a checkpoint of the warm start is removed once a later one is finished."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the warm start; its moments are dropped afterwards."""


@dataclass(frozen=True)
class UpdateFilterConfig:
    """Treatment of harmful optimizer updates of actor or critic (docs/algorithms.md)."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "skip"
    """Treatment of an update whose loss or gradient norm is NaN or infinite: end the job; skip the update; or roll back
    to the newest checkpoint and go on with other tasks."""
    spike_factor: Annotated[float, Bound(1, above=True)] | None = None
    """A gradient norm above this factor times the median of the model's last ``spike_window`` updates is a spike; None
    detects no spikes."""
    spike_window: Annotated[int, Bound(2, 10**6)] = 50
    """Updates in the median of ``spike_factor``."""
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    """Treatment of an update whose gradient norm is a spike."""
    max_bad_steps: Count = 5
    """Consecutive steps with a non-finite or spiking update after which the job ends."""


Offload = Literal["none", "memory", "disk"]
"""Place of a model's memory in phases that do not need it: the device, host memory or a file."""


@dataclass(frozen=True)
class TrainerConfig:
    steps: Count = 100
    """Reinforcement-learning steps: one rollout each. (Offline: steps on rows of a file.)"""
    tasks_per_step: Count = 64
    """Tasks of a rollout. (Offline: rows of a step.)"""
    updates_per_step: Count = 1
    """Optimizer updates that share one rollout (verl's mini-batches)."""
    ppo_epochs: Count = 1
    """Passes over a rollout, each with the same ``updates_per_step`` updates in the same order."""
    packing: bool = True
    """Pack sequences into chunks of at most ``max_tokens_per_micro_batch``; False pads each sequence to the longest."""
    max_tokens_per_micro_batch: Count = 8192
    """Tokens per forward and backward pass on one data-parallel rank (split over the ranks of ``parallel.cp``)."""
    max_patches_per_micro_batch: Count | None = None
    """With packing: most image patches per forward and backward pass on one data-parallel rank, repeated images counted
    each time; null is no limit. Bounds the memory of the vision tower (docs/vision.md)."""
    micro_batch_size: Count = 128
    """Without packing: rows per forward and backward pass on one data-parallel rank."""
    checkpoint_interval: Count = 20
    """Steps between two checkpoints; the last step always has one."""
    keep_checkpoints: Count = 2
    """Number of newest finished checkpoints that are kept."""
    keep_best: str | None = None
    """Metric of held-out evaluations (``val/accuracy``, ``val/loss``) whose best checkpoint is also kept, as
    ``run:DIR@best`` (docs/checkpoints.md). A loss is best at its minimum, other metrics at their maximum."""
    remote: str | None = None
    """URL of a folder, as fsspec has it (``s3://bucket/run``, ``file:///mnt/run``), to which finished checkpoints are
    copied beside training. A start takes the newest from there that this machine lacks (docs/checkpoints.md)."""
    keep_state: Literal["off", "neighbour", "disk"] = "off"
    """Keep each rank's state after every step, so that a killed rank costs no finished step: ``neighbour`` in the
    memory of its node and of the next one, ``disk`` on its node's disk (docs/checkpoints.md). It lasts as long as the
    command."""
    async_checkpoint: bool = True
    """Write checkpoints in a forked process of each rank while training goes on; a checkpoint is finished once all
    ranks have written it. The last checkpoint of a job is always written synchronously."""
    verify_checkpoints: bool = True
    """Verify the digests of a checkpoint before a job resumes from it or starts from a converted model; False compares
    only sizes."""
    max_failed_checkpoints: Count = 3
    """Consecutive checkpoints between steps that may fail for lack of disk space, each with a warning; at this number
    the job ends."""
    eval_interval: NonNegative = 0
    """Steps between evaluations of held-out accuracy (offline: loss); 0 evaluates only before and after training."""
    eval_engines: NonNegative = 0
    """Engines reserved for evaluations between steps, while training goes on with the others; 0 evaluates with all
    engines and waits. Needs ``sync.pause=keep`` (docs/asynchrony.md)."""
    seed: Seed = 1
    """Seed of task order, of sampling and of torch's generators."""
    num_threads: Threads = 1
    """CPU threads of one trainer rank."""
    logits_bytes: Count | None = None
    """Most bytes of logits on one rank; larger logits are computed in chunks of rows, and again in the backward pass.
    None computes a micro-batch's logits whole."""
    loop: str | None = None
    """Python file with a training loop of your own, ``run(rank)``, in place of megarl's (examples/own_loop.py). For
    jobs that sample."""
    kernels: Literal["megarl", "torch"] = "megarl"
    """Kernels for log-probs, advantages and losses: megarl's, or plain-torch references (slower, more memory, for
    comparison)."""
    keep_batches: bool = False
    """Write the tokens and loss masks that each step trains on to RUN_DIR/batches, for ``megarl data tokens RUN``
    (docs/data.md). Not in offline jobs."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    """Trackers of metrics in addition to ``metrics.jsonl`` and the report (docs/sweeps.md); keys and addresses come
    from the environment."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and learning-rate schedule of the actor."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Supervised steps before the first rollout."""
    update_filter: UpdateFilterConfig = field(default_factory=UpdateFilterConfig)
    """Treatment of harmful updates."""
    offload: Offload = "none"
    """Place of the actor's parameters and optimizer in phases of a step that do not need them; gradients are dropped
    then."""
    offload_disk_bytes: Count | None = None
    """Most bytes of one rank's files in RUN_DIR/offload for ``offload=disk``, all roles together; null is no limit."""
    stream_optimizer_bytes: Count | None = None
    """Bytes of optimizer state that an update of an offloaded actor or critic has on the device at once, more only for
    a single larger parameter; null brings it back whole before the update."""


WrongEnd = Literal[
    "workflow_error", "workflow_timeout", "tool_timeout", "abandoned", "environment_error", "environment_timeout"
]


KV_CACHE_BYTES = 2**28
"""Default bytes of an engine worker's KV cache."""


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout engines: ``replicas`` servers of tp * pp workers each."""

    tp: Ranks = 1
    """Tensor-parallel workers of an engine."""
    pp: Ranks = 1
    """Pipeline stages of an engine."""
    expert_parallel: bool = False
    """Put whole experts on each of an engine's ``tp`` ranks, instead of a slice of every expert."""
    routing_replay: bool = False
    """Record in engines the experts chosen for each token, and make the actor choose the same (docs/algorithms.md)."""
    replicas: Annotated[int, Bound(1, 1024)] = 1
    """Number of engines."""
    nodes: Ranks = 1
    """Nodes per engine; its tp * pp workers spread evenly over them."""
    placement: Literal["separate", "colocated"] = "separate"
    """Devices of the engines: separate ones, or the trainer ranks' devices in turn (docs/roles.md)."""
    offload: Literal["sleep", "memory", "destroy"] = "sleep"
    """State of colocated engines while the trainer computes: ``sleep`` drops weights and KV cache; ``memory`` drops the
    KV cache and moves weights to host memory (for jobs with adapters, which change few weights); ``destroy`` ends and
    restarts engines."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt. None takes the longest of ``taskset.train`` and ``taskset.eval`` at the run's first
    start."""
    max_response_tokens: Count = 64
    """Most tokens of a response; longer ones are truncated, with finish reason ``length``."""
    segment_tokens: Count | None = None
    """Tokens after which an unfinished response is saved to the store, so that it resumes there if a process dies
    (docs/asynchrony.md). None saves only whole groups."""
    max_repeats: Annotated[int, Bound(2)] | None = None
    """Number of consecutive repetitions of a sequence (of at most 256 tokens) at the end of a segment that ends the
    response (docs/asynchrony.md). None never stops a repetition."""
    budget_tokens: Count | None = None
    """Partial rollouts: tokens after which a trajectory of a later step pauses until the next publication of weights,
    then continues with them. None never pauses."""
    budget_s: Seconds | None = None
    """Seconds since the publication with the same effect as ``budget_tokens``; with both, the first reached counts.
    Runs then do not repeat bit for bit."""
    spare: Annotated[int, Bound(0, 1024)] = 0
    """Trajectories sampled for each training group beyond ``algorithm.group_size``; the last to end are cancelled
    (docs/asynchrony.md). Biases towards short responses, and runs do not repeat bit for bit."""
    max_trajectory_tokens: Count | None = None
    """Most tokens of a trajectory: its prompt and all turns. None allows a prompt and one response."""
    max_images: Annotated[int, Bound(1, 1024)] = 16
    """Most images of a trajectory, including the task's (docs/vision.md)."""
    temperature: Annotated[float, Bound(0.01, 2)] = 1.0  # a group's greedy responses would be identical
    """Temperature of sampling, and of the log-probs on both sides. vLLM treats values below 0.01 as 0.01 and refuses
    values above 2."""
    max_num_seqs: Count = 512
    """Most sequences in an engine's batch (vLLM's)."""
    enforce_eager: bool = False
    """Run engines on GPUs without torch.compile and CUDA graphs: faster start, slower sampling (vLLM's). Always true on
    CPUs."""
    block_size: Annotated[int, Bound(32, 1024, multiple=32)] = 32  # the only block sizes of vLLM's CPU attention
    """Tokens of a block of the KV cache (vLLM's)."""
    kv_cache_bytes: Annotated[int, Bound(2**20)] | None = None
    """Bytes of KV cache of one engine worker; null takes 256 MiB, or what ``gpu_memory_utilization`` leaves if that is
    set."""
    gpu_memory_utilization: Annotated[float, Bound(0, 1, above=True)] | None = None
    """Share of a GPU's memory for an engine worker; the KV cache gets what weights and activations leave (vLLM's).
    Replaces ``kv_cache_bytes``; GPUs only."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: the model's, or 8 bits (GPUs only). With 8 bits the engine's log-probs then differ from the
    trainer's, so ``algorithm.correction``, ``sync.probe_tolerance`` and ``sync.sample_tolerance`` must be set
    (docs/tuning.md)."""
    weight_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the engines' linear layers and experts: the model's, or 8 bits, quantised as weights arrive. 8 bits need
    ``model.dtype=bfloat16`` and the settings that an 8-bit KV cache needs. Embeddings, LM head, routers and vision
    towers keep the model's type (docs/tuning.md)."""
    speculative: Literal["none", "ngram", "suffix", "mtp"] = "none"
    """Method that drafts tokens, which the model then verifies in one forward pass (vLLM's): ``ngram`` repeats the
    sequence's own text, ``suffix`` also other responses, ``mtp`` uses the prediction layers of ``model.path``, which
    are not trained. Samples keep the model's distribution (docs/tuning.md)."""
    speculative_tokens: Annotated[int, Bound(1, 32)] = 4
    """Most tokens of a draft."""
    engine_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further options of vLLM's engine by their vLLM names, such as ``{max_num_batched_tokens: 16384}``
    (docs/tuning.md). Options that megarl sets, or that its checks depend on, are refused."""
    num_threads: Threads = 1
    """CPU threads of one engine worker."""
    start_timeout_s: Seconds = 300.0
    """Timeout in seconds of an engine's start, until it serves."""
    request_timeout_s: Seconds = 300.0
    """Longest time in seconds in which an engine with running requests generates no token, weight updates excluded. It
    does not limit a response."""
    retries: Annotated[int, Bound(0, 100)] = 2
    """Retries of a trajectory, with the same seeds, after an error of its workflow or environment."""
    wrong_ends: list[WrongEnd] = field(default_factory=list, hash=False)
    """Ends that count as a wrong response with score 0, because the policy may have caused them (docs/workflows.md)."""
    concurrent_groups: Count = 64
    """Groups that the explorers keep in flight."""
    explorers: Annotated[int, Bound(1, 256)] = 1
    """Processes that run workflows, serve agents and claim groups; more than one if one is overloaded. They share
    ``concurrent_groups`` and ``reward.workers``."""
    environment: str = "guess"
    """Environment of ``rollout.workflow=environment``: ``guess``, an environment of another package, or your Python
    file (docs/environments.md)."""
    environment_threads: Count = 256
    """Most concurrent calls of environments."""
    environment_timeout_s: Seconds = 300.0
    """Timeout in seconds of an environment's ``make``, ``step`` or ``close``."""
    agent: str = ""
    """Agent of ``rollout.workflow=agent``: a Python file with ``run``, or a command line (docs/agents.md)."""
    agent_env: list[str] = field(default_factory=list, hash=False)
    """Names of further environment variables for an agent command; by default it gets none of your keys
    (docs/agents.md)."""
    agent_sandbox: bool = False
    """Run agent commands in a sandbox that shows only system programs, the folders of their files and the endpoint
    (docs/agents.md)."""
    agent_paths: list[str] = field(default_factory=list, hash=False)
    """Further files and folders that a sandboxed command may read."""
    agent_rewards: bool = False
    """True if the agent returns the reward of every trajectory; rows then need no verifier."""
    agent_timeout_s: Seconds = 3600.0
    """Timeout in seconds of an agent's run."""
    workflow: str = "single_turn"
    """Workflow that turns a task into a trajectory: ``single_turn``, ``reflect``, ``best_of_n``, ``tools``,
    ``environment``, ``agent``, or your Python file (docs/workflows.md)."""
    tools: list[str] = field(default_factory=list, hash=False)
    """Tools of ``rollout.workflow=tools``: ``python``, ``calculator``, and Python files with your functions."""
    tool_format: str | None = None
    """Format of tool calls for a chat template without tools; the prompt must then describe the tools. None takes the
    template's (docs/workflows.md)."""
    max_tool_calls: Count = 16
    """Most tool calls of a trajectory."""
    tool_timeout_s: Seconds = 30.0
    """Timeout in seconds of a tool call."""
    on_tool_timeout: Literal["report", "end"] = "report"
    """Consequence of a timeout in your own function: the model gets an error; or the trajectory is retried, then ends
    as ``tool_timeout``. The model's code always gets an error."""
    tool_result_chars: Annotated[int, Bound(64)] = 8192
    """Most characters of a tool's result; longer results are truncated."""
    tool_memory_mib: Annotated[int, Bound(64)] = 1024
    """MiB of memory of a trajectory's Python session."""
    tool_python: str | None = None
    """Interpreter of the tool ``python``, with its packages; None takes the default of ``reward.code.python``."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the environment, of ``best_of_n`` (docs/workflows.md), or of your own workflow, passed as
    ``options``."""
    workflow_timeout_s: Seconds = 3600.0
    """Most seconds of a workflow's own work, without waits for the engine and the verifier. Agents have
    ``agent_timeout_s`` instead."""

    @property
    def cache_bytes(self) -> int | None:
        """KV cache of one engine worker in bytes; None if ``gpu_memory_utilization`` decides."""
        if self.kv_cache_bytes is None and self.gpu_memory_utilization is None:
            return KV_CACHE_BYTES
        return self.kv_cache_bytes

    @property
    def is_colocated(self) -> bool:
        """True if engines share the devices of trainer ranks in turn."""
        return self.placement == "colocated"

    @property
    def is_partial(self) -> bool:
        """True for partial rollouts."""
        return self.budget_tokens is not None or self.budget_s is not None


@dataclass(frozen=True)
class EvaluationConfig:
    """Responses to held-out tasks every ``trainer.eval_interval`` steps. One greedy response by default."""

    samples: Count = 1
    """Responses to each task; above 1 it needs a temperature, and gives avg@k and pass@k with standard errors."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Bound(0, 1, above=True)] = 1.0
    """Sample from the fewest tokens whose probabilities add up to this; 1 keeps all."""
    top_k: NonNegative = 0
    """Number of likeliest tokens to sample from; 0 keeps all."""
    average: Annotated[float, Bound(0, 1, below=True)] | None = None
    """Evaluate an exponential moving average of the actor with this decay, such as 0.9, and write it to
    RUN_DIR/hf_average; null evaluates the actor. The average costs one more float32 copy of each rank's weights."""


@dataclass(frozen=True)
class ReferenceConfig:
    refresh: Literal["never", "every_iteration"] | Count = "never"
    """Steps at whose start the reference takes the actor's weights: none, every step, or every N-th."""
    parallel: ParallelConfig | None = None
    """Grid of the reference on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute type of the reference; null takes the model's."""
    offload: Offload = "none"
    """Place of the reference's parameters in phases that do not need them."""


@dataclass(frozen=True)
class CriticConfig:
    path: str | None = None
    """HF sequence-classification checkpoint with one label, or a PEFT folder with a score head (``reward_model.path``
    too); None copies the actor, with a head of zeros."""
    parallel: ParallelConfig | None = None
    """Grid of the critic on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute type of the critic; null takes the model's."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """AdamW and learning-rate schedule of the critic."""
    warmup_steps: NonNegative = 0
    """Steps at the start in which only the critic is trained."""
    offload: Offload = "none"
    """Place of the critic's parameters and optimizer in phases that do not need them; gradients are dropped then."""


@dataclass(frozen=True)
class RewardModelConfig:
    path: str | None = None
    """HF sequence-classification checkpoint with one label, or a PEFT folder with a score head; its score of each
    response is added to the reward. None for none."""
    parallel: ParallelConfig | None = None
    """Grid of the reward model on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute type of the reward model; null takes the model's."""
    coef: RewardWeight = 1.0
    """Factor of the reward model's score in the reward."""
    offload: Offload = "none"
    """Place of the reward model's parameters in phases that do not need them."""


@dataclass(frozen=True)
class TeacherConfig:
    """A teacher of on-policy distillation (docs/distillation.md)."""

    path: str | None = None
    """HF checkpoint of a language model with the actor's tokenizer, of any architecture and size; computed by the
    trainer's ranks. A teacher has either ``path`` or ``url``."""
    url: str | None = None
    """Base URL (http://HOST:PORT/v1) of a vLLM server of such a model, with its key in MEGARL_TEACHER_KEY_NAME or
    MEGARL_TEACHER_KEY; asked by the explorer when a trajectory ends."""
    model: str | None = None
    """Name of the model at ``url``; None takes the first that the server lists."""
    concurrency: Annotated[int, Bound(1, 4096)] = 32
    """Most requests in flight to ``url``."""
    timeout_s: Seconds = 120.0
    """Timeout in seconds of one request to ``url``."""
    retries: Annotated[int, Bound(0, 100)] = 3
    """Retries of a failed request to ``url``."""
    outage_s: Annotated[float, Bound(0, 30 * 86400)] = 300.0
    """Seconds for which requests wait for an unreachable ``url``; the job ends then."""
    max_failures: Count = 32
    """Trajectories in a row without scores from ``url`` that end the job."""
    sources: list[str] = field(default_factory=list, hash=False)
    """``data_source`` of the teacher's tasks: exact names, or prefixes that end in ``/``; an empty list for tasks that
    no other teacher names."""
    weight: Coefficient = 1.0
    """Factor of the teacher's log-ratio in the advantage."""
    decay_steps: Count | None = None
    """Trainer step at which ``weight``, falling linearly from the first step, is 0; None keeps it."""
    parallel: ParallelConfig | None = None
    """Grid of the teacher on the same ranks; None takes the actor's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute type of the teacher; null takes the model's."""
    offload: Offload = "none"
    """Place of the teacher's parameters in phases that do not need them."""


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
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
