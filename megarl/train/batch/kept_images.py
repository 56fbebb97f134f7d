"""Images of a kept step, from the trajectories of the run's store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megarl.core.errors import ConfigError
from megarl.core.schema import ImagesAt, Trajectory
from megarl.learn.batching import Sequences
from megarl.train.batch.images import ImageInputs

ReadImages = Callable[[Sequence[str]], tuple[Sequence[Trajectory], Mapping[str, bytes]]]
"""Group ids -> their trajectories, and digest -> file of the images in these."""


def put_images(
    inputs: ImageInputs, sequences: Sequences, owners: Sequence[tuple[str, int] | None], read: ReadImages
) -> None:
    """Set ``sequences.images``: a sequence has the images of its trajectory's sample with the same tokens.

    Args:
        owners: (group id, index) of each sequence's trajectory; None for an expert's.

    Raises:
        ConfigError: a sequence is an expert's, or no sample of its trajectory has its tokens.
    """
    if None in owners:
        raise ConfigError("the kept step has expert rows beside images, and no kept step has the images of expert rows")
    known = [owner for owner in owners if owner is not None]
    trajectories, files = read(list(dict.fromkeys(group for group, _ in known)))
    samples = {(one.group_id, one.index): list(one.samples()) for one in trajectories}
    starts = sequences.cu_seqlens.tolist()
    found: list[Sequence[ImagesAt]] = []
    for number, owner in enumerate(known):
        tokens = sequences.tokens[starts[number] : starts[number + 1]].numpy()
        own = (
            one.images
            for one in samples.get(owner, [])
            if np.array_equal(np.concatenate([one.prompt_ids, one.response_ids]), tokens)
        )
        if (images := next(own, None)) is None:
            raise ConfigError(f"no turns of response {owner[1]} of group {owner[0]} in the store have its kept tokens")
        found.append(images)
    inputs.of_step(files).put(sequences, found, "sequence {}".format)
