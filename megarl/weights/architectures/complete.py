"""Completion of a config.json with the defaults of transformers' class of its family."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.megatron_config import check
from megarl.weights.architectures.table import HFConfig, check_counts

log = logging.getLogger(__name__)

_OLDER = ("rope_scaling", "rope_theta")
"""Keys that the class merges into ``rope_parameters``."""


def complete(hf_config: HFConfig) -> dict[str, Any]:
    """Return the configuration with every key of the family's class; keys unknown to the class stay unchanged.

    In a vision-language model the keys of ``text_config`` move to the top level, as in a text model.

    Keys common to all classes (labels, dtype) are not filled in. A configuration of a family without a table is
    returned unchanged. If the class refuses a configuration that the table covers, it is returned unchanged with a
    warning. Raises ArchitectureError if the table does not cover it. transformers is imported here: it takes a second.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in ARCHITECTURES:
        return dict(hf_config)
    check_counts(model_type, hf_config)
    text_config = hf_config.get("text_config", {})
    if not isinstance(text_config, Mapping):
        raise ArchitectureError(
            f"config.json of a {model_type} model has text_config={text_config!r}; it must be an object"
        )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with _without_docstrings():
        family = CONFIG_MAPPING[ARCHITECTURES[model_type].config_class or model_type]
    common = {field.name for field in fields(PreTrainedConfig)}
    try:
        values = family(**copy.deepcopy({**hf_config, "model_type": family.model_type})).to_dict()
    except (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        check(ARCHITECTURES[model_type], hf_config)
        log.warning("config.json: transformers' %s refuses it, so nothing was filled in: %s", family.__name__, error)
        return dict(hf_config)
    text = values.pop("text_config", {})
    if isinstance(values.get("vision_config"), Mapping):
        values["vision_config"] = {key: value for key, value in values["vision_config"].items() if key not in common}
    given = {**text_config, **hf_config}
    own = {key: value for key, value in (text | values).items() if key not in common and not key.startswith("_")}
    own["model_type"] = model_type
    return {key: value for key, value in given.items() if key not in (*_OLDER, "text_config")} | own


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """Skip transformers' docstring generation when importing classes: it would import all modelling code (1.5 s)."""
    module = import_module("transformers.utils.auto_docstring")
    written = module.auto_class_docstring
    module.auto_class_docstring = lambda cls, **_: cls  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.auto_class_docstring = written  # type: ignore[attr-defined]
