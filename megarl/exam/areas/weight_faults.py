"""Faults of weights on their way from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.exam.fault import Fault, replace, wrap, wrap_in

# What the trainer has, or takes for it.


def _keep_masters() -> None:
    from megarl.learn.training.model import Model

    replace(Model.weights_changed, lambda self: None)


def _skip_gather() -> None:
    from megarl.learn.training.model import TrainedModel

    def skip(self: Any) -> None:
        self.model.gathered = True

    replace(TrainedModel.finish_gather, skip)


def _garble_memory() -> None:
    from megarl.learn.memory.residents import _Copy

    def read(original: Any, self: Any, into: Any) -> None:
        into = list(into)
        original(self, into)
        for each in into:
            each[:256] = 0

    wrap(_Copy.read, read)


def _send_reference() -> None:
    from megarl.train.sync.weights import WeightSync

    def delivered(original: Any, self: Any, actor: Any) -> Any:
        is_first = self.version.n == 1 and self.step > 0
        return self._models.reference.tensors if is_first else original(self, actor)

    wrap(WeightSync._delivered, delivered)


def _send_older() -> None:
    from megarl.train.sync.probe import SentWeights
    from megarl.train.sync.weights import WeightSync

    kept: list[Any] = []

    def send(original: Any, self: Any, *, abort: bool = False, sent: Any = None) -> Any:
        if sent is None:
            actor = self._models.actor.model
            kept.append(SentWeights.copy_of(self._delivered(actor), actor.written(), self._probe()))
            sent = kept[-2:][0]
        return original(self, abort=abort, sent=sent)

    wrap(WeightSync.send_version, send)


def _train_base() -> None:
    _freeze_again(lambda name, is_trained: True)


def _freeze_adapters() -> None:
    _freeze_again(lambda name, is_trained: is_trained and "layers.0.self_attention.linear_proj" in name)


def _freeze_again(trains: Callable[[str, bool], bool]) -> None:
    from megarl.learn.models import lora

    def freeze(original: Any, chunks: Any, saved: Any) -> Any:
        found = original(chunks, saved)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad = trains(name, parameter.requires_grad)
        return found

    wrap(lora.freeze, freeze)


# What the trainer makes of it to send.


def _sending(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Send other tensors than those that were compared with what the optimizer wrote."""
    from megarl.weights.reshard import execute

    def send(original: Any, plan: Any, rank: int, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(plan, rank, change(tensors), *args, **kwargs)

    wrap(execute.send, send)


def _send_changed_elements() -> None:
    before: dict[str, Any] = {}

    def changed(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, tensor in tensors.items():
            old = before.get(name, tensor)
            before[name] = tensor.clone().where(tensor.bfloat16() != old.bfloat16(), old)
        return dict(before)

    _sending(changed)


def _send_tensor_once() -> None:
    first: dict[str, Any] = {}

    def once(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        name = next(name for name in sorted(tensors) if "linear_proj" in name)
        return {**tensors, name: first.setdefault(name, tensors[name].clone())}

    _sending(once)


def _of_rank_0(chosen: str) -> None:
    import torch.distributed as dist

    def of_rank_0(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {name: tensors[name].clone() for name in sorted(tensors) if name.startswith(chosen)}
        for tensor in found.values():
            dist.broadcast(tensor, 0)
        return {**tensors, **found}

    _sending(of_rank_0)


def _send_first_shard() -> None:
    _of_rank_0("")


def _send_first_stage() -> None:
    _of_rank_0("decoder.layers.")


def _round_routers() -> None:
    def rounded(name: str, tensor: Any) -> Any:
        return tensor.bfloat16().to(tensor.dtype) if "router.weight" in name else tensor

    _sending(lambda tensors: {name: rounded(name, tensor) for name, tensor in tensors.items()})


def _exchange_experts() -> None:
    def other(name: str) -> str:
        for one, two in ((".local_experts.0.", ".local_experts.1."), (".local_experts.1.", ".local_experts.0.")):
            if one in name:
                return name.replace(one, two)
        return name

    _sending(lambda tensors: {name: tensors[other(name)] for name in tensors})


def _separately(change: Callable[[Any, str, Any], Any]) -> None:
    """Send something else of separate adapters and of the model under them."""
    from megarl.weights.reshard.adapters import SeparateTensors

    wrap(SeparateTensors.__getitem__, lambda original, self, name: change(self, name, original(self, name)))


def _send_no_adapter() -> None:
    _separately(lambda self, name, found: found * 0 if name in self.scales else found)


def _leave_alpha_out() -> None:
    _separately(lambda self, name, found: self.model.factors[name] if name in self.scales else found)


def _merge_under_adapters() -> None:
    from megarl.weights.reshard.adapters import MergedTensors

    _separately(lambda self, name, found: MergedTensors(self.model)[name] if name in self.model.adapters else found)


def _merging(change: Callable[[Any, Any, list[Any], Mapping[str, Any]], Any]) -> None:
    from megarl.weights.reshard import adapters

    wrap(adapters.merged, lambda original, base, own, factors, *sign: change(original, base, own, factors))


def _divide_by_rank() -> None:
    from dataclasses import replace as but

    def rescaled(own: Any) -> Any:
        return but(own, factors=own.factors._replace(scale=own.factors.scale / own.factors.rank**0.5))

    _merging(lambda merge, base, own, factors: merge(base, [rescaled(each) for each in own], factors))


def _merge_in_bfloat16() -> None:
    def rounded(merge: Any, base: Any, own: list[Any], factors: Mapping[str, Any]) -> Any:
        low = {name: tensor.bfloat16() for name, tensor in factors.items()}
        whole = base.bfloat16()
        for each in own:
            product, at = low[each.b] @ low[each.a] * each.factors.scale, 0
            for begin, end in each.places:
                whole[begin:end] += product[at : at + end - begin]
                at += end - begin
        return whole.to(base.dtype)

    _merging(rounded)


def _exchange_halves() -> None:
    from dataclasses import replace as but

    def exchanged(merge: Any, base: Any, own: list[Any], factors: Mapping[str, Any]) -> Any:
        places = [each.places for each in own]
        if len(own) == 2:
            own = [but(each, places=place) for each, place in zip(own, reversed(places), strict=True)]
        return merge(base, own, factors)

    _merging(exchanged)


# On their way, and what the engine does with them.


def _mark_bucket() -> None:
    import torch

    from megarl.weights.reshard.buckets import HEADER
    from megarl.weights.reshard.execute import Outgoing

    def pack(original: Any, self: Any, bucket: Any) -> Any:
        message = original(self, bucket)
        if bucket.nbytes:
            message[HEADER : HEADER + 4] = torch.tensor([0xAB, 0xDC, 0xEF, 0x88], dtype=torch.uint8)
        return message

    wrap(Outgoing.pack, pack)


def _reuse_bucket() -> None:
    from megarl.weights.reshard.buckets import HEADER
    from megarl.weights.reshard.execute import Outgoing

    def pack(original: Any, self: Any, bucket: Any) -> Any:
        message = original(self, bucket)
        others = vars(self).setdefault("others", [])
        elements = message[HEADER:]
        others.append(elements.clone())
        size = min(len(elements), len(others[0])) // 2
        elements[:size] = others[0][:size]
        return message

    wrap(Outgoing.pack, pack)


def _keeping(keeps: Callable[[Any], bool]) -> None:
    """Let an update leave layers of the engine as they were."""
    from vllm.model_executor.model_loader.reload import layerwise

    def process(original: Any, layer: Any, info: Any) -> None:
        if not keeps(layer):
            original(layer, info)
            return
        layerwise._place_kernel_tensors(layer, info)
        info.reset()

    wrap(layerwise._layerwise_process, process)


def _keep_all() -> None:
    _keeping(lambda layer: True)


def _keep_head() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    _keeping(lambda layer: isinstance(layer, ParallelLMHead))


def _keep_experts_unpacked() -> None:
    from megarl.engines.sync.writer import repack_experts

    replace(repack_experts, lambda model: None)


def _transpose() -> None:
    from vllm.model_executor.layers.linear import LinearBase

    from megarl.engines.sync.writer import SliceWriter

    def pack(original: Any, self: Any, module: Any) -> None:
        if isinstance(module, LinearBase) and module.weight.shape[0] == module.weight.shape[1]:
            module.weight.data.copy_(module.weight.data.t().clone())
        original(self, module)

    wrap(SliceWriter.pack, pack)


def _keep_scales() -> None:
    from megarl.engines.sync.writer import SliceWriter

    first: dict[str, Any] = {}

    def finish(original: Any, self: Any) -> None:
        original(self)
        for path, module in self._model.named_modules():
            if hasattr(module, "weight_scale"):
                module.weight_scale.data.copy_(first.setdefault(path, module.weight_scale.data.clone()))

    wrap(SliceWriter.finish, finish)


def _copy_head() -> None:
    import torch.nn.functional as F
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def apply(original: Any, self: Any, head: Any, hidden: Any, bias: Any) -> Any:
        if not hasattr(self, "copied"):
            self.copied = head.weight.data.clone()
        return F.linear(hidden, self.copied, bias)

    wrap_in(LogitsProcessor, "_apply_head", apply)


def _restore_first() -> None:
    from megarl.engines.sync.sleep import HostSleeper

    first: dict[str, Any] = {}

    def wake(original: Any, self: Any, what: str) -> Any:
        found = original(self, what)
        if what == "kv_cache":
            for path, module in self._worker.weight_transfer_engine.model.named_modules():
                own = {name: each.data.clone() for name, each in module.named_parameters(recurse=False)}
                packed = vars(module).get("cpu_linear")
                before, layer = first.setdefault(path, (own, packed))
                for name, value in before.items():
                    module.get_parameter(name).data.copy_(value)
                if packed is not None:
                    module.cpu_linear = layer
        return found

    wrap(HostSleeper.wake, wake)


def _apply_no_adapter() -> None:
    from megarl.engines.sync import one_adapter

    replace(one_adapter._add_lora_linear, lambda *args, **kwargs: None)


FAULTS: tuple[Fault, ...] = (
    # What the trainer has, or takes for it.
    Fault(
        "masters-of-initialisation",
        "NVIDIA-NeMo/RL#2371",
        "Loading weights leaves the optimizer's masters at their random initial values, which the first step writes.",
        alarm="written",
        job="tiny",
        install=_keep_masters,
        settings=("model.dtype=bfloat16",),
        within=0,
    ),
    Fault(
        "parameters-not-gathered",
        "NVIDIA-NeMo/RL#4086",
        "Parameters are sent before the optimizer's deferred all-gather: each rank has its share beside stale ones.",
        alarm="written",
        job="dp2",
        install=_skip_gather,
        begins=3,  # the weights of update 1 are whole: 1.2 passes every digest
        settings=("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
    ),
    Fault(
        "actor-lost-in-memory",
        "fzyzcjy/torch_memory_saver#71",
        "The actor's weights come back from host memory with other values than they had when they left the device.",
        alarm="memory",
        job="colocated",
        install=_garble_memory,
        settings=("trainer.offload=memory",),
    ),
    Fault(
        "reference-sent",
        "THUDM/slime#2224",
        "The first weights after a resume are the reference's, not the resumed actor's.",
        alarm="written",
        job="resume",
        install=_send_reference,
        begins=3,
    ),
    Fault(
        "older-copy-sent",
        "radixark/miles#3128",
        "The weights sent are the host copy of the step before, with its digests and its probe.",
        alarm="written",
        job="tiny",
        install=_send_older,
        begins=2,
        unseen="Digests and probe are those of the copy, so only samples differ.",
    ),
    Fault(
        "base-not-frozen",
        "Blaizzy/mlx-vlm#2178",
        "The model under the adapters is trained too.",
        alarm="base",
        job="lora",
        install=_train_base,
        begins=2,
    ),
    Fault(
        "adapter-frozen",
        "huggingface/trl#6700",
        "All adapters but one are frozen, so that the optimizer does not have them.",
        alarm="untrained",
        job="lora",
        install=_freeze_adapters,
        begins=2,
    ),
    # What the trainer makes of it to send.
    Fault(
        "small-changes-left-out",
        "huggingface/trl#5932",
        "Only elements whose bfloat16 form has changed since the last sync are sent.",
        alarm="sent",
        job="tiny",
        install=_send_changed_elements,
        begins=2,
    ),
    Fault(
        "tensor-not-sent-again",
        "huggingface/trl#5937",
        "A tensor that the last update did not change is left out, although an update before had changed it.",
        alarm="sent",
        job="tiny",
        install=_send_tensor_once,
        begins=2,
    ),
    Fault(
        "first-shard-for-all",
        "vllm-project/vllm-gguf-plugin#103",
        "Every tensor-parallel rank sends the share of rank 0.",
        alarm="sent",
        job="tp2",
        install=_send_first_shard,
        within=0,
    ),
    Fault(
        "local-layer-numbers",
        "NVIDIA-NeMo/RL#3259",
        "The second pipeline stage numbers its layers from 0: the engine gets the first stage's layers twice.",
        alarm="sent",
        job="pp2",
        install=_send_first_stage,
        within=0,
    ),
    Fault(
        "router-in-bfloat16",
        "PrimeIntellect-ai/prime-rl#3524",
        "Routers are trained in float32 and rounded to bfloat16 on their way.",
        alarm="sent",
        job="moe",
        install=_round_routers,
        within=0,
    ),
    Fault(
        "experts-exchanged",
        "verl-project/verl#7195",
        "Weights of one expert are sent as another's.",
        alarm="sent",
        job="moe",
        install=_exchange_experts,
        within=0,
    ),
    Fault(
        "adapter-not-sent",
        "verl-project/verl#7495",
        "The engine gets the frozen model and adapters of zeros at every sync.",
        alarm="sent",
        job="lora",
        install=_send_no_adapter,
        settings=("sync.adapter=separate",),
        within=0,
    ),
    Fault(
        "adapter-without-alpha",
        "Tencent-Hunyuan/UniRL#155",
        "The engine applies adapters with scale 1 instead of alpha / rank.",
        alarm="sent",
        job="lora",
        install=_leave_alpha_out,
        settings=("sync.adapter=separate",),
        within=0,
    ),
    Fault(
        "adapter-without-root",
        "vllm-project/vllm#6909",
        "A rank-stabilised adapter is merged with alpha / rank instead of alpha / sqrt(rank).",
        alarm="sent",
        job="lora",
        install=_divide_by_rank,
        settings=("model.lora.rslora=true",),
        within=0,
    ),
    Fault(
        "adapter-merged-in-bfloat16",
        "NVIDIA-NeMo/RL#3696",
        "W + scale · B·A is computed in bfloat16, which loses most of a small update.",
        alarm="sent",
        job="lora",
        install=_merge_in_bfloat16,
        within=0,
    ),
    Fault(
        "adapter-merged-twice",
        "radixark/miles#1087",
        "The model under separate adapters is sent with the adapters merged in, so that the engine adds them twice.",
        alarm="sent",
        job="lora",
        install=_merge_under_adapters,
        settings=("sync.adapter=separate",),
    ),
    Fault(
        "adapter-halves-exchanged",
        "sgl-project/sglang#34940",
        "Adapters of a fused gate and up projection are sent in the other order.",
        alarm="sent",
        job="lora",
        install=_exchange_halves,
    ),
    # On their way, and what the engine does with them.
    Fault(
        "marker-in-bucket",
        "verl-project/verl#6813",
        "The mark of a message's end overwrites the first four bytes of its elements.",
        alarm="digest",
        job="tiny",
        install=_mark_bucket,
        within=0,
    ),
    Fault(
        "bucket-overwritten",
        "modelscope/ms-swift#10204",
        "The sender reuses a bucket before the engine has read it: its first half is another message's.",
        alarm="digest",
        job="tiny",
        install=_reuse_bucket,
        settings=("sync.bucket_bytes=65536",),
        within=0,
    ),
    Fault(
        "reload-cached",
        "vllm-project/vllm#32718",
        "The engine takes an update and computes with the weights that it had loaded before.",
        alarm="digest",
        job="tiny",
        install=_keep_all,
        begins=2,
    ),
    Fault(
        "tied-head-stale",
        "PrimeIntellect-ai/prime-rl#2823",
        "The embedding is updated, the separate copy of a tied output layer is not.",
        alarm="digest",
        job="tiny",
        install=_keep_head,
        begins=2,
        settings=("model.path={folder}/tied",),
    ),
    Fault(
        "experts-packed-for-another-kernel",
        "NovaSky-AI/SkyRL#1680",
        "A reload stores experts unpacked, and the kernel reads them as packed.",
        alarm="digest",
        job="moe",
        install=_keep_experts_unpacked,
        within=0,
    ),
    Fault(
        "transposed-twice",
        "modelscope/ms-swift#9828",
        "Processing after an update transposes square weights that are in the kernel's form already.",
        alarm="digest",
        job="tiny",
        install=_transpose,
        within=0,
    ),
    Fault(
        "scale-stale",
        "sgl-project/sglang#30761",
        "Weights in 8 bits are updated, their scales are those of the first weights.",
        alarm="eight-bits",
        job="tiny",
        install=_keep_scales,
        begins=2,
        settings=(
            "rollout.weight_dtype=fp8",
            "model.dtype=bfloat16",
            "algorithm.correction=truncate",
            "sync.probe_tolerance=0.06",
            "sync.sample_tolerance=0.1",
            "trainer.optimizer.lr=1e-3",
        ),
    ),
    Fault(
        "head-copy-stale",
        "PrimeIntellect-ai/prime-rl#2438",
        "The engine computes log-probs with a copy of the output layer from before the update.",
        alarm="probe",
        job="tiny",
        install=_copy_head,
        begins=2,
    ),
    Fault(
        "lost-in-sleep",
        "huggingface/trl#5312",
        "Waking up gives the engine the weights that it began with, after the update.",
        alarm="probe",
        job="colocated",
        install=_restore_first,
        begins=2,
    ),
    Fault(
        "adapter-on-nothing",
        "verl-project/verl-omni#552",
        "The engine takes an adapter and applies it to no layer.",
        alarm="adapter",
        job="lora",
        install=_apply_no_adapter,
        settings=("sync.adapter=separate",),
        within=0,
    ),
)
