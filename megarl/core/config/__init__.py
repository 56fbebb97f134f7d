"""Settings: composed by hydra from ``configs/``, held in frozen dataclasses, checked before anything starts."""

from megarl.core.config.load import compose, config_dir, from_dict, load_resolved, save_resolved, to_dict
from megarl.core.config.schema import Config

__all__ = ["Config", "compose", "config_dir", "from_dict", "load_resolved", "save_resolved", "to_dict"]
