"""megarl: reinforcement learning for language models on Megatron-Core and vLLM.

Importing this package imports neither torch, Megatron-Core nor vLLM.
"""

__version__ = "0.1.0"
