"""megarl: reinforcement learning for language models on Megatron-Core and vLLM.

Importing this package imports neither torch, Megatron-Core nor vLLM.
"""

from megarl.old_names import keep_old_names

__version__ = "0.1.0"

keep_old_names()
