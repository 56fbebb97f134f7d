"""Settings: composed by hydra from ``configs/``, held in frozen dataclasses, checked before anything starts.

Code here imports ``core`` alone. It reads YAML and command lines, never models, rows or the store.
"""

from megarl.config.load import compose, config_dir, from_dict, load_resolved, save_resolved, to_dict
from megarl.config.schema import Config

__all__ = ["Config", "compose", "config_dir", "from_dict", "load_resolved", "save_resolved", "to_dict"]

FACE = (
    "algorithms",
    "bounds",
    "derived",
    "hub",
    "job",
    "load",
    "lora",
    "overrides",
    "rewards",
    "schema",
    "settings_page",
    "taskset",
    "verl.command",
)
"""Modules that other packages may import."""
