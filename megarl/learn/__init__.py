"""Models, losses and their training, on every grid of ranks.

Code here works on tensors and Megatron-Core, without store, engines or tasks.
"""

FACE = (
    "algorithms",
    "algorithms.terms.reduction",
    "algorithms.terms.token_rewards",
    "batching",
    "batching.images",
    "batching.sequences",
    "memory.activation_bytes",
    "memory.ledger",
    "memory.phases",
    "memory.resident_bytes",
    "memory.residents",
    "models.attention",
    "models.experts",
    "models.from_scratch",
    "models.gpt",
    "models.recompute",
    "models.specs",
    "models.teaching",
    "parallel.grid",
    "parallel.process_groups",
    "plain",
    "training.adapters",
    "training.model",
    "training.objectives",
    "training.optimizer",
    "training.role_adapters",
    "training.schedule",
    "training.streaming",
)
"""Modules that other packages may import."""
