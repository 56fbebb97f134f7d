"""Registers, where it is imported, vLLM's classes of the tests' models: for processes from which engines are forked.

Else vLLM starts a process of seven CPU seconds to look at a class, for the first engine of each family on a machine,
and again after another version of vLLM has run there.
"""

from __future__ import annotations

import importlib

from vllm import ModelRegistry

CLASSES = {
    "deepseek_v2": "DeepseekV3ForCausalLM",
    "ernie45": "Ernie4_5ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Module of vLLM -> its class, which is also the architecture's name."""

for _module, _name in CLASSES.items():
    _class = getattr(importlib.import_module(f"vllm.model_executor.models.{_module}"), _name)
    ModelRegistry.register_model(_name, _class)
