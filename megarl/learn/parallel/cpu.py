"""Adapts Megatron-Core (0.16.1, 0.19.2) to machines without CUDA, TransformerEngine or apex.

On a CPU nothing of TransformerEngine or apex computes, installed or not. On a GPU only ``ON_EVERY_DEVICE`` is
installed. Two of these functions check themselves whether the packages exist, and then change nothing.

Each point is one function with its reason; ``tests/parallel/test_megatron_on_cpu.py`` tests each of them. Nothing here
changes arithmetic: streams and events become no-ops, device names become "cpu".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import get_ignored_functions
from torch.utils._device import _device_constructors

_installed = False


class _NullObject:
    """Replaces a CUDA stream, event or stream context: every method exists and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NullObject:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NullObject]:
        return lambda *args, **kwargs: _NullObject()


def install() -> bool:
    """Make Megatron-Core run on this machine; return True on a CPU. Safe to call twice."""
    global _installed
    on_cpu = not torch.cuda.is_available()
    if not _installed:
        _installed = True
        for point in POINTS:
            if on_cpu or point in ON_EVERY_DEVICE:
                point()
    return on_cpu


def _cuda_runtime() -> None:
    """Replace current device, streams, events and synchronisation; Megatron uses them without checking for CUDA."""
    cuda = torch.cuda
    cpu = torch.device("cpu")
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "set_device": lambda *a, **k: None,
        "synchronize": lambda *a, **k: None,
        "empty_cache": lambda *a, **k: None,
        "current_stream": lambda *a, **k: _NullObject(),
        "default_stream": lambda *a, **k: _NullObject(),
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "Stream": _NullObject,
        "Event": _NullObject,
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]


def _device_literals() -> None:
    """Create tensors on the CPU where schedules, gradient buffers and norm clipping ask for "cuda" or pinned memory."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "pin_memory" in kwargs:
                del kwargs["pin_memory"]
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    # torch caches these sets of its functions. If cached later, they would contain the replacements: then
    # ``torch.device`` as a context no longer finds factories, and transformers' from_pretrained leaves rotary tables
    # uninitialised.
    _device_constructors()
    get_ignored_functions()
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    ShardedTensor.init_data.__defaults__ = (torch.empty,)  # bound when the class was made


def _rng_state() -> None:
    """Replace the CUDA generator, which tensor-parallel RNG tracking saves and restores, by the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    cuda = torch.cuda
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[assignment]
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[assignment]
    cuda.random.get_rng_state = cuda.get_rng_state
    megatron_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)


def _optimizer_dtype_names() -> None:
    """Return CUDA type names within three optimizer functions, which compare ``Tensor.type()`` with such names."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as megatron_optimizer

    plain_type = torch.Tensor.type

    @contextlib.contextmanager
    def cuda_names() -> Iterator[None]:
        def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return plain_type(self, *args, **kwargs)
            return plain_type(self).replace("torch.", "torch.cuda.", 1)

        torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.Tensor.type = plain_type  # type: ignore[method-assign]

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with cuda_names():
                return function(*args, **kwargs)

        return call

    for cls in (megatron_optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        cls.__init__ = within(cls.__init__)
    clip = within(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = megatron_optimizer.clip_grad_by_total_norm_fp32 = clip


MOMENTS = "exp_avg", "exp_avg_sq"
"""AdamW's moments, by the names of apex, TE and torch."""


class FusedLayoutAdamW(torch.optim.Optimizer):
    """torch's AdamW arithmetic with the state layout of apex/TE FusedAdam: one integer ``step`` per group.

    Without apex or TE the distributed optimizer loads one shared ``step`` tensor for all parameters. torch's AdamW then
    increments it once per parameter, so training does not resume. With this layout it resumes bitwise.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        # An attribute, not a group entry: loading a checkpoint replaces the groups.
        self.adam_w_mode = adam_w_mode
        self.exp_avg_dtype = torch.float32

    def initialize_state(self, p: torch.Tensor) -> None:
        """Create zero moments of ``exp_avg_dtype``."""
        self.state[p].update({name: torch.zeros_like(p, dtype=self.exp_avg_dtype) for name in MOMENTS})

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state; moments keep ``exp_avg_dtype``, where torch would cast them to the type of the masters."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(self.exp_avg_dtype) for name in MOMENTS if name in state})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        from torch.optim.adam import adam

        assert closure is None, "Megatron-Core calls step() without a closure"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue  # FusedAdam does not count steps of empty groups either
            group["step"] = int(group.get("step") or 0) + 1
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.initialize_state(p)
            first, second = ([self.state[p][name].float() for p in params] for name in MOMENTS)
            adam(
                params,
                [p.grad for p in params],
                first,
                second,
                [],
                # adam() increments in place: one scalar for each parameter
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )
            for p, *moments in zip(params, first, second, strict=True):
                for name, moment in zip(MOMENTS, moments, strict=True):
                    self.state[p][name].copy_(moment)


def _fused_layout_adam() -> None:
    """Use ``FusedLayoutAdamW`` and the distributed optimizer's FusedAdam branches; on a GPU keep FusedAdam of apex or
    TE."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE and torch.cuda.is_available():
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def _local_implementations() -> None:
    """Use Megatron's own gradient norms, clipping and router products: kernels of TransformerEngine and apex need
    CUDA."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as megatron_optimizer
    from megatron.core.transformer.moe import moe_utils

    for module in (clip_grads, megatron_optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    moe_utils.te_general_gemm = None  # already None with TransformerEngine 2.11, which lacks one imported name


def _absent_transformer_engine() -> None:
    """Correct modules that misbehave without TransformerEngine: one uses the placeholder as the real class and in 0.19
    lacks a linear layer, two others lack a name."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not transformer_engine.HAVE_TE:
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = Linear
        moe_utils.te_general_gemm = None
        # Any value except None, even False, makes it query TransformerEngine's FP8 state (recompute_modules).
        make = CheckpointWithoutOutput.__init__
        CheckpointWithoutOutput.__init__ = lambda self, fp8=None: make(self, None)


def _expert_counts_on_host() -> None:
    """Return split sizes as numpy arrays to the token dispatcher, which gets them only from tensors on a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _uneven_shares() -> None:
    """Pad the unequal numbers of tokens that experts with tensor parallelism (etp) exchange: NCCL allows unequal
    shares, gloo does not."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(share: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([share, share.new_zeros(size - len(share), *share.shape[1:])])

    def gather_shares(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(tensor, group, None, use_global_buffer)
        longest = int(max(sizes))
        shares = gather(padded(tensor, longest), group).split(longest)
        return torch.cat([share[: int(size)] for share, size in zip(shares, sizes, strict=True)])

    def reduce_shares(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, None, use_global_buffer)
        shares, longest = tensor.split([int(size) for size in sizes]), int(max(sizes))
        mine = reduce_scatter(torch.cat([padded(share, longest) for share in shares]), group)
        return mine[: int(sizes[group.rank()])]

    mappings._gather_along_first_dim = gather_shares
    mappings._reduce_scatter_along_first_dim = reduce_shares


def _copied_outputs() -> None:
    """Copy recomputed outputs in Python, as 0.16 does. 0.19 uses a C++ extension that ranks build in a user folder: the
    lock of a rank killed during the build stays, and later ranks wait for it forever."""
    from megatron.core.tensor_parallel import random

    def copy(output: torch.Tensor, computed: torch.Tensor) -> None:
        output.untyped_storage().resize_(computed.untyped_storage().size())
        output.untyped_storage().copy_(computed.untyped_storage())

    if hasattr(random, "_get_share_storage"):
        random._get_share_storage = lambda: copy


POINTS: tuple[Callable[[], None], ...] = (
    _cuda_runtime,
    _device_literals,
    _rng_state,
    _optimizer_dtype_names,
    _fused_layout_adam,
    _local_implementations,
    _absent_transformer_engine,
    _expert_counts_on_host,
    _uneven_shares,
    _copied_outputs,
)
ON_EVERY_DEVICE = (_fused_layout_adam, _absent_transformer_engine, _copied_outputs)
