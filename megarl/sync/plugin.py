"""Entry point of vLLM's ``vllm.general_plugins``: names our weight receiver to every process of an engine."""

from __future__ import annotations

BACKEND = "megarl"


def register() -> None:
    """Registers the weight-transfer backend ``megarl``; vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # register_engine raises on a second call and offers no question of its own.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.sync.receiver", "Receiver")
