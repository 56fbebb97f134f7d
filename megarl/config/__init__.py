"""Settings: composed by hydra from ``configs/``, held in frozen dataclasses, checked before anything starts."""

from megarl.config.load import compose, config_dir, from_dict, load_resolved, save_resolved, to_dict
from megarl.config.schema import Config

__all__ = ["Config", "compose", "config_dir", "from_dict", "load_resolved", "save_resolved", "to_dict"]
