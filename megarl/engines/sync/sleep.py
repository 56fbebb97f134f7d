"""Sleep of an engine's worker; addresses of a vLLM model's tensors, which a sync must not move.

Runs inside vLLM's workers.

Weights are freed until the trainer's next publication; or kept in host memory, for a trainer that publishes few of
them. On CPU, vLLM's own sleep does nothing, so the storages are freed here by ``resize_(0)``, which leaves every tensor
and view valid; the packed copies that vLLM's CPU kernels made are dropped. On CUDA, vLLM's sleep does the work (never
run on a GPU). Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.platforms import current_platform

from megarl.core.errors import WeightSyncError, first_of
from megarl.core.processes.machine import resident_bytes, trim_memory

LATENT = frozenset(("W_UV", "W_UK_T"))
"""Matrices that latent attention derives from ``kv_b_proj`` at the end of every update."""
ADAPTERS = ("lora_a_stacked", "lora_b_stacked")
"""Buffers of vLLM's LoRA layers, one for each tensor that is fused in a layer."""
NOT_PUBLISHED = "the weights were freed by megarl_sleep, and no publication has brought them since"
_SHOWN = 4


class Address(NamedTuple):
    """Place of a tensor in memory."""

    pointer: int
    """``data_ptr()``; 0 if the storage is empty."""
    nbytes: int
    """Bytes of its whole storage."""

    def __str__(self) -> str:
        return f"{self.pointer:#x} ({self.nbytes} bytes)"


def addresses_of(model: nn.Module) -> dict[str, Address]:
    """Return name -> address of every parameter and buffer of ``model`` and of latent attention's matrices, including
    those set aside by a running update."""
    return {
        f"{path}.{name}": Address(tensor.data_ptr(), tensor.untyped_storage().nbytes())
        for path, module in model.named_modules()
        for name, tensor in _tensors(module)
        if not tensor.is_meta
    }


def check_addresses(before: Mapping[str, Address], after: Mapping[str, Address]) -> None:
    """Compare addresses before and after a sync. Raises WeightSyncError naming the tensors that were moved, resized,
    removed or added."""
    moved = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    if not moved:
        return
    texts = [f"{name} from {before.get(name, 'nowhere')} to {after.get(name, 'nowhere')}" for name in moved]
    raise WeightSyncError(
        f"the sync moved tensors of the engine's model: {first_of(texts, _SHOWN)}; captured graphs read the old "
        "addresses, so the engine must be started again"
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    aside = get_layerwise_info(module).kernel_tensors
    parameters, buffers = (module._parameters, module._buffers) if aside is None else aside
    latent = {name: value for name, value in vars(module).items() if name in LATENT}
    adapters = {
        f"{name}.{number}": tensor
        for name in ADAPTERS
        if isinstance(stacked := vars(module).get(name), tuple)
        for number, tensor in enumerate(stacked)
    }
    for name, tensor in (*latent.items(), *adapters.items(), *parameters.items(), *buffers.items()):
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


What = Literal["weights", "kv_cache"]
"""Memory to free, by vLLM's names."""
WHAT: tuple[What, ...] = get_args(What)


class Sleeper(Protocol):
    """One worker's memory, asleep or awake."""

    asleep: set[What]
    moves: bool
    """True if woken memory may have another address."""

    def sleep(self, keep_weights: bool) -> dict[str, int]:
        """Free all awake memory. Returns the bytes ``freed`` and the process's resident bytes, ``rss``.

        Args:
            keep_weights: Keep the weights' values in host memory until they wake.
        """

    def wake(self, what: What) -> dict[str, int]:
        """Allocate memory again, unless awake. Returns the bytes ``taken`` and the process's resident bytes, ``rss``.

        Weights that were not kept have no values until the next publication; the KV cache is zero.
        """


def sleeper_of(worker: Any) -> Sleeper:
    """Return the sleeper for a vLLM worker's device, with all memory awake."""
    return HostSleeper(worker) if current_platform.is_cpu() else DeviceSleeper(worker)


class HostSleeper:
    """Memory of a worker on CPU. Bytes are differences of the process's resident memory."""

    moves = True

    def __init__(self, worker: Any) -> None:
        self.asleep: set[What] = set()
        self._worker = worker
        self._freed: dict[What, list[tuple[torch.UntypedStorage, int]]] = {}

    def sleep(self, keep_weights: bool) -> dict[str, int]:
        """Free KV cache, parameters and packed copies. Weights to keep are in host memory already, and stay awake."""
        before = resident_bytes()
        model = self._worker.weight_transfer_engine.model
        if not keep_weights and "weights" not in self.asleep:
            self._freed["weights"] = _free(_weights(model))
            _drop_packed(model)
        if "kv_cache" not in self.asleep:
            self._freed["kv_cache"] = _free(_kv_cache(self._worker))
        self.asleep |= {"kv_cache"} if keep_weights else set(WHAT)
        trim_memory()
        after = resident_bytes()
        return {"freed": before - after, "rss": after}

    def wake(self, what: What) -> dict[str, int]:
        """Restore the storages' sizes. Pages of weights become resident when a publication writes them; its reload
        packs them and copies them into the storages of vLLM's kernels."""
        before = resident_bytes()
        if what in self.asleep:
            for storage, size in self._freed[what]:
                storage.resize_(size)  # raises without memory; a later wake starts here again
                if what == "kv_cache":
                    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,)).zero_()  # type: ignore[call-overload]
            self.asleep.discard(what)
            del self._freed[what]
        after = resident_bytes()
        return {"taken": after - before, "rss": after}


class DeviceSleeper:
    """Memory of a worker on CUDA, by vLLM's sleep of level 2 or 1 (never run on a GPU).

    Level 2 discards weights and KV cache, and copies the model's buffers to host memory until the weights wake. Level 1
    copies the weights, with all other memory of the model's load, to pinned host memory.

    Only memory of vLLM's pool is freed: the engine must be started with ``--enable-sleep-mode``. vLLM's engine core
    pauses scheduling and resets its caches before a sleep; ``EngineControl.sleep`` does that here, without the core's
    knowledge of the sleep. So its dummy batches, which only data-parallel engines run, would fail. Woken memory keeps
    its address.
    """

    moves = False

    def __init__(self, worker: Any) -> None:
        self.asleep: set[What] = set()
        self._worker = worker

    def sleep(self, keep_weights: bool) -> dict[str, int]:
        """Let vLLM free all awake device memory. Raises WeightSyncError if its pool is not in use."""
        if not self._worker.model_config.enable_sleep_mode:
            raise WeightSyncError("this engine cannot sleep: it was started without --enable-sleep-mode")
        if self.asleep == {"weights"}:  # vLLM first copies the buffers, which sleep with the weights
            raise WeightSyncError("the weights sleep and the KV cache is awake: wake the weights before another sleep")
        before = device_bytes_free()
        if self.asleep != set(WHAT):
            self._worker.sleep(level=1 if keep_weights else 2)
            self.asleep = set(WHAT)
        return {"freed": device_bytes_free() - before, "rss": resident_bytes()}

    def wake(self, what: What) -> dict[str, int]:
        """Let vLLM map the memory again."""
        before = device_bytes_free()
        if what in self.asleep:
            self._worker.wake_up(tags=[what])
            if what == "kv_cache":
                for tensor in _kv_cache(self._worker):
                    tensor.zero_()
            self.asleep.discard(what)
        return {"taken": before - device_bytes_free(), "rss": resident_bytes()}


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that every update writes or derives, including those set aside by an interrupted update."""
    for module in model.modules():
        info = get_layerwise_info(module)
        names = info.restore_metadata[0].keys() | SKIP_TENSORS | (LATENT if isinstance(module, MLAAttention) else set())
        aside = {} if info.kernel_tensors is None else info.kernel_tensors[0]
        for name, parameter in (*module.named_parameters(recurse=False), *aside.items()):
            if name in names and not parameter.is_meta:
                yield parameter


def _drop_packed(model: nn.Module) -> None:
    """Release the packed copies of linear layers, which belong to their ``cpu_linear``; an update recreates both."""
    for module in model.modules():
        if "cpu_linear" in vars(module) and "weight" in get_layerwise_info(module).restore_metadata[0]:
            module.cpu_linear = _not_published  # type: ignore[assignment]


def _not_published(*_: Any) -> torch.Tensor:
    raise WeightSyncError(NOT_PUBLISHED)


def _kv_cache(worker: Any) -> Iterator[torch.Tensor]:
    """Yield the KV caches of the runner and of attention layers, as views that share storages."""
    yield from worker.model_runner.kv_caches
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        yield from (t for t in (cache if isinstance(cache, list | tuple) else [cache]) if torch.is_tensor(t))


def _free(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the storages of ``tensors``; return each non-empty storage once, with its bytes."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    freed = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed


def device_bytes_free() -> int:
    """Return the device's free bytes after all kernels have ended."""
    torch.accelerator.synchronize()
    return int(torch.accelerator.get_memory_info()[0])
