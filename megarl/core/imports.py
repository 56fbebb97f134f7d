"""Imports of users' Python files, and of libraries without parts that they do not need.

transformers' processors of Qwen2.5-VL and Qwen3-VL contain a video processor, and fail without torchvision.
torchvision has no CPU build on the package index, and megarl takes images only.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

from megarl.core.errors import ConfigError, describe

T = TypeVar("T")


def import_file(path: str, setting: str, wanted: str) -> ModuleType:
    """Import the file that a setting names. Raises ConfigError with the setting and the failing line if that fails."""
    where = f"{setting}={path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; give a Python file with {wanted}")
    name = f"megarl_user_{setting.partition('.')[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: not a Python file, whose name ends in .py; give one with {wanted}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look up annotations there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where} cannot be imported: {describe(error, path)}") from error
    return module


def import_value(path: str, setting: str, name: str, kind: type[T]) -> T:
    """Return variable ``name`` of the file, an instance of the public class ``kind``. Errors as in ``import_file``."""
    public = f"{'.'.join(kind.__module__.split('.')[:3])}.{kind.__name__}"
    value = getattr(import_file(path, setting, f"{name}, a {public}"), name, None)
    if not isinstance(value, kind):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{setting}={path} has {found} called {name}; it must be a {public}")
    return value


class _AtFirstUse(ModuleType):
    """Placeholder that imports a module at the first use of one of its names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def reasoning_gym() -> ModuleType:
    """Import reasoning-gym (half a second); call it where rows are made or scored.

    cellpylib, needed by two of its families, imports matplotlib (0.2 s more). It is imported when they make a row.
    """
    sys.modules.setdefault("cellpylib", _AtFirstUse("cellpylib"))
    return import_module("reasoning_gym")


def do_without_videos() -> None:
    """If torchvision is missing, build processors of Qwen2.5-VL and Qwen3-VL from image processor and tokenizer alone.

    Call it in every process that opens a processor; a second call changes nothing. Takes 0.04 s.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.processing_utils import VideosKwargs

    processors: tuple[Any, ...] = (Qwen2_5_VLProcessor, Qwen3VLProcessor)
    for processor in processors:
        processor.__init__ = _init
        # vLLM reads the names of its arguments, and for Qwen3-VL sizes of videos, which it then makes none of.
        processor.video_processor = SimpleNamespace(valid_kwargs=VideosKwargs, size=VIDEO, temporal_patch_size=2)
    # vLLM imports smart_resize from the module that needs torchvision; this module has the same function.
    sys.modules.setdefault(f"{pil.__package__}.image_processing_qwen2_vl", pil)


VIDEO = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
"""Fewest and most pixels of a video, transformers' defaults for Qwen3-VL."""


# transformers reads the processor's parts from this signature.
def _init(
    self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **unused: Any
) -> None:
    from transformers.processing_utils import ProcessorMixin

    for kind in ("image", "video"):
        token = getattr(tokenizer, f"{kind}_token", f"<|{kind}_pad|>")
        setattr(self, f"{kind}_token", token)
        setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
