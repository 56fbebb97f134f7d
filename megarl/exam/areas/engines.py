"""Faults of what an engine computes and samples with the right weights, and of the trainer's own forward pass."""

from __future__ import annotations

from megarl.exam.fault import Fault

SHARED_PREFIX = ("rollout.block_size=16", "taskset.train_size=8", "rollout.max_prompt_tokens=40")
"""Tasks that come again at every step, and prompts longer than a block of the prefix cache."""

FAULTS: tuple[Fault, ...] = (
    # Keys, values and captured graphs of older weights.
    Fault(
        "prefix-cache-kept",
        "InternLM/lmdeploy#4917",
        "A weight sync leaves the prefix cache: prompts that come again are answered from keys of old weights.",
        alarm="sampled",
        job="turns",
    ),
    Fault(
        "prefix-cache-kept-by-async",
        "NovaSky-AI/SkyRL#2246",
        "An asynchronous sync skips the reset of the prefix cache, which a synchronous one makes.",
        alarm="sampled",
        job="late",
        settings=SHARED_PREFIX,
        within=2,
    ),
    Fault(
        "prefix-cache-of-other-adapter",
        "vllm-project/vllm#42125",
        "An adapter reloaded under the same name finds the prefix cache of the adapter before.",
        alarm="sampled",
        job="lora",
        settings=("sync.adapter=separate", *SHARED_PREFIX),
    ),
    Fault(
        "running-keys-kept",
        "NVIDIA-NeMo/RL#3152",
        "Responses that go on after a sync are continued from keys and values of the old weights.",
        alarm="stale-keys",
        job="late",
        settings=("sync.pause=keep",),
        within=2,
    ),
    Fault(
        "decode-graph-stale",
        "vllm-project/vllm#48312",
        "Prompts are computed with the new weights, sampled tokens by a captured graph that reads the old ones.",
        alarm="decode",
        job="tiny",
    ),
    # Log-probs of another distribution than the one sampled from.
    Fault(
        "logp-without-temperature",
        "huggingface/trl#4159",
        "The engine reports log-probs from before the temperature, the trainer computes them after it.",
        alarm="sampled",
        job="tiny",
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "logp-divided-by-temperature",
        "PrimeIntellect-ai/prime-rl#697",
        "Log-probs are divided by the temperature, instead of the logits.",
        alarm="sampled",
        job="tiny",
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "logp-renormalised",
        "huggingface/trl#6789",
        "Sampling keeps the likeliest tokens only, and log-probs are those among them.",
        alarm="sampled",
        job="tiny",
    ),
    Fault(
        "penalty-on",
        "verl-project/verl#7270",
        "A repetition penalty of the checkpoint's generation config changes what is sampled, and its log-probs.",
        alarm="sampled",
        job="tiny",
    ),
    Fault(
        "defaults-of-checkpoint",
        "NVIDIA-NeMo/RL#3497",
        "The checkpoint's top-k and top-p change what is sampled; reported log-probs are of the whole distribution.",
        alarm="surprise",
        job="tiny",
    ),
    Fault(
        "padded-rows-sampled",
        "mirage-project/mirage#751",
        "Padded rows of the output layer take part in sampling, with logits of 0.",
        alarm="probe",
        job="tiny",
        within=0,
    ),
    # Another function of the same weights.
    Fault(
        "norm-epsilon",
        "NVIDIA-NeMo/Megatron-Bridge#5712",
        "Some norms of the trainer use their default epsilon instead of the model's.",
        alarm="probe",
        job="tiny",
        within=0,
    ),
    Fault(
        "rope-base",
        "sgl-project/SpecForge#265",
        "The trainer ignores the model's rope_theta.",
        alarm="probe",
        job="tiny",
        within=0,
    ),
    Fault(
        "window-one-short",
        "vllm-project/vllm#3385",
        "The engine's sliding window has one token less than the trainer's.",
        alarm="far",
        job="tiny",
        within=0,
    ),
    Fault(
        "router-weights-rounded",
        "sgl-project/sglang#39351",
        "The engine rounds the routers' weights of experts to bfloat16.",
        alarm="probe",
        job="moe",
        within=0,
    ),
    Fault(
        "head-rounded",
        "allenai/open-instruct#1387",
        "The engine computes the output layer in bfloat16, the trainer in float32.",
        alarm="probe",
        job="tiny",
        within=0,
    ),
    Fault(
        "keys-in-8-bits-without-scale",
        "NVIDIA-NeMo/RL#3225",
        "The engine keeps keys and values in 8 bits with scale 1 instead of calibrated ones.",
        alarm="probe",
        job="tiny",
        within=0,
    ),
    Fault(
        "dropout-on",
        "Human-Agent-Society/reef#536",
        "Megatron's default dropout stays on in the trainer's forward pass.",
        alarm="sampled",
        job="tiny",
    ),
    # What is sampled.
    Fault(
        "equal-samples",
        "Tencent-Hunyuan/UniRL#208",
        "All samples of a group have the same seed, so that they are equal.",
        alarm="equal-samples",
        job="tiny",
    ),
    Fault(
        "half-equal-samples",
        "verl-project/verl#6857",
        "Samples are numbered in each half of a group by itself, so that each has a twin with the same seed.",
        alarm="equal-samples",
        job="tiny",
    ),
    Fault(
        "end-token-dropped",
        "InternLM/xtuner#1063",
        "The engine's answer lacks the end token that it sampled, so that stopping is never trained.",
        alarm="no-end",
        job="tiny",
    ),
    Fault(
        "end-token-forced",
        "OpenRLHF/OpenRLHF#238",
        "The last token of a truncated response is replaced by an end token that was not sampled.",
        alarm="sampled",
        job="tiny",
    ),
    Fault(
        "end-token-ignored",
        "google/tunix#2314",
        "The engine does not stop at the end token of a turn, and goes on to the longest length.",
        alarm="past-end",
        job="tiny",
    ),
)
