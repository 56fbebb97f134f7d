"""Nouns, errors, metrics, durable files and processes: the base of every other package.

Code here imports no other package of megarl and no torch, and reads no settings.
"""

FACE = (
    "durable",
    "errors",
    "jobs",
    "kept_batches",
    "metrics",
    "pictures",
    "processes.collector",
    "processes.fork",
    "processes.gloo_device",
    "processes.heartbeat",
    "processes.machine",
    "processes.out_of_memory",
    "processes.parent",
    "processes.secrets",
    "proof",
    "published",
    "reasoning",
    "schema",
    "text",
    "thoughts",
    "truncation",
    "user_file",
    "without_videos",
)
"""Modules that other packages may import."""
