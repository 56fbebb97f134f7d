"""Tiny models of the families with images, sequences with images, and what plain transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.parallel.families import VOCAB, hf_model

if TYPE_CHECKING:
    from megarl.learn.batching import Sequences
    from megarl.learn.batching.images import Image

FAMILY = "qwen2_5_vl"
DEEPSTACK = "qwen3_vl"
"""Family whose first layers add vectors of images."""
HYBRID = "qwen3_5_vl"
"""Family with gated delta nets among its layers."""
IMAGE, MERGE = 4, 2
PATCH = 3 * 2 * 14 * 14
"""Numbers of a patch."""
GRIDS = {"a": (1, 4, 6), "b": (1, 2, 2), "c": (1, 8, 2), "d": (1, 10, 8)}
"""Images by their digest; that of d is larger than an attention window."""
IMAGES = (("a",), (), ("b", "c"), ("d",), ("c",), ("a", "b"), ())
"""Images of each sequence; some are shared."""


def pixels(digest: str) -> torch.Tensor:
    """float32 [p, w] of one image."""
    generator = torch.Generator().manual_seed(ord(digest[0]))
    time, rows, columns = GRIDS[digest]
    return torch.randn(time * rows * columns, PATCH, generator=generator)


def images() -> list[list[Image]]:
    from megarl.learn.batching.images import Image

    return [[Image(digest, GRIDS[digest]) for digest in own] for own in IMAGES]


def sequences() -> Sequences:
    """Prompts with their images, and responses; the last sequence has text alone, and a placeholder that was
    sampled."""
    from megarl.learn.batching import Sequences
    from megarl.learn.batching.images import Vision, images_of

    generator = torch.Generator().manual_seed(5)
    vision, tokens, mask, lengths = Vision(IMAGE, MERGE), [], [], []

    def words(n: int) -> list[int]:
        return torch.randint(6, VOCAB, (n,), generator=generator).tolist()

    for number, own in enumerate(images()):
        prompt = words(1 + number % 3)
        for image in own:
            prompt += [2, *[IMAGE] * vision.vectors(image), 3, *words(2)]
        response = words(3 + 2 * number)
        tokens += [*prompt, *response]
        mask += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        lengths.append(len(prompt) + len(response))
    tokens[-4] = IMAGE
    found = Sequences(torch.tensor(tokens, dtype=torch.int32), torch.tensor(lengths), torch.tensor(mask))
    shown = [[(0, length, own)] for length, own in zip(found.lengths.tolist(), images(), strict=True)]
    found.images = images_of(found.tokens, found.lengths, shown, pixels, vision)
    return found


def inputs_of(tokens: torch.Tensor, own: list[Image]) -> dict[str, torch.Tensor]:
    """Arguments of transformers' models for one sequence [L] with its images."""
    ids = tokens.long()[None]
    if not own:
        return {"input_ids": ids}
    return {
        "input_ids": ids,
        "pixel_values": torch.cat([pixels(image.digest) for image in own]),
        "image_grid_thw": torch.tensor([image.grid for image in own]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def transformers_logp(model: Any) -> torch.Tensor:
    """float32 [T]: log-probs of the tokens in the loss where they are predicted, 0 elsewhere; each sequence by
    itself."""
    made, parts = sequences(), []
    starts = made.cu_seqlens.tolist()
    for start, end, own in zip(starts, starts[1:], images(), strict=False):
        inputs = inputs_of(made.tokens[start:end], own)
        logits = model(**inputs).logits.float().log_softmax(-1)[0]
        parts.append(logits.gather(-1, torch.roll(inputs["input_ids"][0], -1)[:, None])[:, 0])
    return torch.cat(parts).masked_fill(~made.mask, 0.0)


def save(path: Path, family: str = FAMILY) -> Path:
    """The model as an HF checkpoint, with ``expected.pt``: its log-probs, and the gradients of their mean by HF name,
    with the tower frozen and trained alike."""
    from tests.parallel.parity import gradients_by_file

    model = hf_model(family)
    model.save_pretrained(path)
    logp = transformers_logp(model)
    count = int(sequences().mask.sum())
    loss = -logp.sum() / count
    loss.backward()
    torch.save(
        {"logp": logp.detach(), "loss": loss.item(), "gradients": gradients_by_file(model)}, path / "expected.pt"
    )
    return path
