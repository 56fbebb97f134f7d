"""Nouns, errors, metrics, durable files and processes: the base of every other package.

Code here imports no other package of megarl and no torch, and reads no settings.
"""

FACE = (
    "durable",
    "errors",
    "imports",
    "jobs",
    "kept_batches",
    "metrics",
    "pictures",
    "processes.fork",
    "processes.gloo_device",
    "processes.heartbeat",
    "processes.machine",
    "processes.memory_files",
    "processes.secrets",
    "published",
    "schema",
    "text",
)
"""Modules that other packages may import."""
