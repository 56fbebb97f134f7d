"""Image processors without their video part, which needs torchvision.

transformers' Qwen2.5-VL processor contains a video processor, and fails without torchvision. torchvision has no CPU
build on the package index, and megarl takes images only.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any


def do_without_videos() -> None:
    """If torchvision is missing, build Qwen2.5-VL's processor from image processor and tokenizer alone.

    Call it in every process that opens a processor; a second call changes nothing. Takes 0.04 s.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    from transformers.models.qwen2_5_vl import processing_qwen2_5_vl
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil
    from transformers.processing_utils import VideosKwargs

    processor: Any = processing_qwen2_5_vl.Qwen2_5_VLProcessor
    processor.__init__ = _init
    processor.video_processor = SimpleNamespace(valid_kwargs=VideosKwargs)  # vLLM reads the names of its arguments
    # vLLM imports smart_resize from the module that needs torchvision; this module has the same function.
    sys.modules.setdefault(f"{pil.__package__}.image_processing_qwen2_vl", pil)


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
