"""States of all random generators of a rank, as JSON: Python's, numpy's, torch's and Megatron's, per grid."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megarl.weights.megatron_private import device_generator, put_device_generator


def of_process() -> dict[str, Any]:
    """States of Python's and numpy's generators, one per process."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def put_process(states: Mapping[str, Any]) -> None:
    """Restore the states from ``of_process``."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def of_grid() -> dict[str, Any]:
    """States of the current grid's generators (torch, GPU, tensor-parallel tracker), with this rank's place."""
    from megatron.core.tensor_parallel import random as megatron

    found = {
        "place": _place(),
        "torch": _text(torch.get_rng_state()),
        "tracker": {name: _text(state) for name, state in megatron.get_cuda_rng_tracker().get_states().items()},
    }
    return found | ({"cuda": _text(device_generator())} if torch.cuda.is_available() else {})


def put_grid(states: Mapping[str, Any]) -> bool:
    """Restore the states from ``of_grid``. Return False, without changes, if they come from another grid or place: they
    would repeat another rank's numbers."""
    from megatron.core.tensor_parallel import random as megatron

    if states["place"] != _place() or ("cuda" in states) != torch.cuda.is_available():
        return False
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states:
        put_device_generator(_tensor(states["cuda"]))
    megatron.get_cuda_rng_tracker().set_states({name: _tensor(text) for name, text in states["tracker"].items()})
    return True


def _place() -> dict[str, list[int]]:
    """Dimension -> [this rank's index, size]."""
    from megatron.core import parallel_state as p

    return {
        "tp": [p.get_tensor_model_parallel_rank(), p.get_tensor_model_parallel_world_size()],
        "pp": [p.get_pipeline_model_parallel_rank(), p.get_pipeline_model_parallel_world_size()],
        "cp": [p.get_context_parallel_rank(), p.get_context_parallel_world_size()],
        "dp": [p.get_data_parallel_rank(), p.get_data_parallel_world_size()],
        "ep": [p.get_expert_model_parallel_rank(), p.get_expert_model_parallel_world_size()],
    }


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
