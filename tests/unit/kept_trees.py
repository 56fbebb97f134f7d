"""Settings composed from trees that hydra has composed before, for tests that compose hundreds of them.

What chooses files is composed once for each choice, which takes a tenth of a second. Values are then set as hydra sets
them, by its own functions, on a copy of the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from megarl.config import config_dir

HYDRAS: Callable[..., Any] = hydra.compose
"""hydra's own function."""
_trees: dict[tuple[str, ...], Any] = {}


@cache
def parsed(override: str) -> Any:
    return OverridesParser.create().parse_override(override)


def compose(config_name: str, overrides: list[str]) -> Any:
    """Return what hydra composes; whatever it refuses is given to hydra itself."""
    places = {source.path for source in GlobalHydra.instance().config_loader().get_search_path().get_path()}
    if str(config_dir()) not in places or len(places) > 3:
        return HYDRAS(config_name, overrides)  # files that a test has written
    try:
        values = [parsed(override) for override in overrides if override.startswith("++")]
        if any(value.is_sweep_override() or value.is_hydra_override() for value in values):
            return HYDRAS(config_name, overrides)
        choices = [override for override in overrides if not override.startswith("++")]
        key = (str(config_dir()), config_name, *choices)
        if key not in _trees:
            _trees[key] = HYDRAS(config_name, choices)
        tree = deepcopy(_trees[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, tree)
    except (HydraException, OmegaConfBaseException):
        return HYDRAS(config_name, overrides)
    return tree
