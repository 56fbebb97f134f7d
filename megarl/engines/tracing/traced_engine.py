"""The engine of a comparison: vLLM within one process, with hooks that record what its modules compute.

``python -m megarl.engines.tracing.traced_engine <options of an engine>`` reads the request from the JSON file that
``$MEGARL_DIFF`` names and writes an ``EngineTrace``.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megarl.engines.server.arguments import server_arguments
from megarl.engines.tracing import points
from megarl.engines.tracing.points import EngineTrace, Point, Record, flat

REQUEST = "MEGARL_DIFF"
"""Variable with the request: ``tokens``, ``messages``, ``sampling``, ``sampled`` and the file ``output``."""
ATTENTIONS, MLPS = ("self_attn", "attn", "attention"), ("mlp", "block_sparse_moe", "feed_forward", "moe")
RECURRENT = ("linear_attn", "short_conv")
"""Layers that see earlier tokens without attention."""
SHARED = "shared_mlp"
"""MLP whose output is added to that of the experts beside it."""
ROUTERS = ("gate", "router")
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "embedding_norm")


class Recorder:
    """Hooks on a model of vLLM. Records hold one sequence: a batch has one request."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._found: dict[Point, list[torch.Tensor]] = defaultdict(list)
        self._undone: list[Callable[[], None]] = []
        self._tokens = 0
        """Tokens of the forward pass."""
        self.layers = layers_of(model)

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Fill the record when the context ends, with the rows of all forward passes in order."""
        record: Record = {}
        self._found.clear()
        self._install()
        try:
            yield record
        finally:
            for undo in self._undone:
                undo()
            self._undone.clear()
        record.update({point: torch.cat(parts) for point, parts in self._found.items()})

    def _install(self) -> None:
        for number, layer in enumerate(self.layers):
            self._before(layer, number, points.STREAM, _stream if _adds_residual(layer) else _hidden)
            attention = _child(layer, ATTENTIONS)
            if attention is not None:
                self._before(attention, number, points.ATTENTION_INPUT, _hidden)
                self._attention(attention, number)
            recurrent = _child(layer, RECURRENT)
            if recurrent is not None:
                self._before(recurrent, number, points.ATTENTION_INPUT, _hidden)
                self._before(recurrent.out_proj, number, points.ATTENTION, _added)  # type: ignore[arg-type]
                self._after(recurrent.out_proj, number, points.PROJECTION)  # type: ignore[arg-type]
            mlp = _child(layer, MLPS)
            if mlp is not None:
                self._before(mlp, number, points.MLP_INPUT, _hidden)
                self._after(mlp, number, points.MLP)
                if (shared := _child(layer, (SHARED,))) is not None:
                    self._after(shared, number, points.MLP, adds=True)
                for name, module in mlp.named_modules():
                    if name.rpartition(".")[2] in ROUTERS and getattr(module, "weight", None) is not None:
                        self._after(module, number, points.ROUTER)
                        break
        norm = _final_norm(self.model, self.layers)
        if norm is not None:
            self._before(norm, len(self.layers), points.STREAM, _added)
            self._after(norm, len(self.layers), points.FINAL_NORM)

    def _attention(self, attention: torch.nn.Module, number: int) -> None:
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        places = {"q_proj": points.QUERY, "k_proj": points.KEY, "v_proj": points.VALUE, "qkv_proj": points.JOINED}
        norms = {"q_norm": points.QUERY_NORM, "k_norm": points.KEY_NORM}
        norms |= {"query_layernorm": points.QUERY_NORM, "key_layernorm": points.KEY_NORM}
        is_latent = any(isinstance(module, MLAAttention) for module in attention.modules())
        for name, module in attention.named_modules():
            last = name.rpartition(".")[2]
            if last in ("o_proj", "dense", "out_proj"):
                self._after(module, number, points.PROJECTION)
            elif isinstance(module, MLAAttention):
                self._after(module, number, points.ATTENTION)
            elif isinstance(module, Attention) and not is_latent:
                self._core(module, number)
            elif not is_latent and last in places | norms:
                self._after(module, number, (places | norms)[last])

    def _core(self, module: Any, number: int) -> None:
        """Record queries, keys and output. Transformers' modules call ``forward`` itself, which has no hooks."""
        forward = module.forward

        def wrapped(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            for operation, tensor in ((points.ROTATED_QUERY, query), (points.ROTATED_KEY, key)):
                self._found[number, operation].append(flat(tensor, self._tokens))
            out: torch.Tensor = forward(query, key, *args, **kwargs)
            self._found[number, points.ATTENTION].append(flat(out, self._tokens))
            return out

        module.forward = wrapped
        self._undone.append(lambda: delattr(module, "forward"))

    def _before(
        self, module: torch.nn.Module, number: int, operation: str, read: Callable[[Any, tuple[Any, ...]], torch.Tensor]
    ) -> None:
        names = list(inspect.signature(module.forward).parameters)

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = {**dict(zip(names, args, strict=False)), **kwargs}
            tensor = read(bound, tuple(bound.values()))
            if operation == points.STREAM:
                self._tokens = tensor.numel() // tensor.shape[-1]
            self._found[number, operation].append(flat(tensor, self._tokens))

        self._undone.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _after(self, module: torch.nn.Module, number: int, operation: str, *, adds: bool = False) -> None:
        """Record a module's output; ``adds``: add it to what another module has recorded."""

        def hook(_: Any, args: Any, output: Any) -> None:
            rows = flat(output[0] if isinstance(output, tuple) else output, self._tokens)
            found = self._found[number, operation]
            if adds:
                found[-1] += rows
            else:
                found.append(rows)

        self._undone.append(module.register_forward_hook(hook).remove)


def _adds_residual(layer: torch.nn.Module) -> bool:
    """Return True if the layer's hidden states and residual are two parts of a sum; EXAONE ignores what it is given."""
    return "residual is None" in inspect.getsource(type(layer).forward)


def _stream(bound: dict[str, Any], _: tuple[Any, ...]) -> torch.Tensor:
    hidden, residual = _hidden(bound, ()), bound.get("residual")
    total: torch.Tensor = hidden if residual is None else hidden.float() + residual.float()
    return total


def _added(_: dict[str, Any], values: tuple[Any, ...]) -> torch.Tensor:
    """Return the sum of a norm's arguments: hidden states, and a residual if there is one."""
    total: torch.Tensor = sum(value.float() for value in values if isinstance(value, torch.Tensor))  # type: ignore[assignment]
    return total


def _hidden(bound: dict[str, Any], _: tuple[Any, ...]) -> torch.Tensor:
    name = next((name for name in ("hidden_states", "hidden_state", "x") if name in bound), None)
    found: torch.Tensor = bound[name] if name else next(v for v in bound.values() if isinstance(v, torch.Tensor))
    return found


def _child(layer: torch.nn.Module, names: tuple[str, ...]) -> torch.nn.Module | None:
    return next((child for name, child in layer.named_children() if name in names), None)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers of the language model. Raises ValueError if the model has none."""
    found = [
        list(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.endswith("layers") and "visual" not in name
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of layers that megarl knows")
    return max(found, key=len)


def _final_norm(model: torch.nn.Module, layers: list[torch.nn.Module]) -> torch.nn.Module | None:
    """Return the norm beside the list of layers."""
    for module in model.modules():
        own = dict(module.named_children())
        if any(isinstance(child, torch.nn.ModuleList) and list(child) == layers for child in own.values()):
            return next((own[name] for name in FINAL_NORMS if name in own), None)
    return None


class TracedEngine:
    """vLLM's engine, core and worker in this process."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._arguments = server_arguments()
        self.engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(self._arguments))
        [self.worker] = self.engine.collective_rpc(lambda worker: worker)
        self.model: torch.nn.Module = self.worker.weight_transfer_engine.model
        self._number = 0

    def ask(self, tokens: list[int], **sampling: Any) -> Any:
        """Return the finished output of one request."""
        from vllm import SamplingParams

        self._number += 1
        parameters = SamplingParams(**sampling, detokenize=False)
        self.engine.add_request(str(self._number), {"prompt_token_ids": tokens}, parameters)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    return output
        raise RuntimeError("the engine returned no output")

    def facts(self) -> dict[str, Any]:
        """Return settings that decide what the engine computes."""
        from vllm.transformers_utils.config import get_config

        config = self.engine.vllm_config
        text, file = config.model_config.hf_text_config, get_config(config.model_config.model, False)
        return {
            "config": json.loads(json.dumps(text.to_dict(), default=str)),
            "file": json.loads(json.dumps(file.get_text_config().to_dict(), default=str)),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "head_dtype": str(config.model_config.head_dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "layers": len(layers_of(self.model)),
            "routers": sorted(
                {
                    str(module.weight.dtype).removeprefix("torch.")
                    for name, module in self.model.named_modules()
                    if name.rpartition(".")[2] in ROUTERS and getattr(module, "weight", None) is not None
                }
            ),
        }

    def rendered(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation by the engine's tokenizer and chat template."""
        tokenizer, file = self.engine.get_tokenizer(), self._arguments.chat_template
        own = None if file is None else Path(file).read_text() if Path(file).is_file() else file
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=own, **kwargs
        )
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids


@torch.no_grad()
def trace(engine: TracedEngine, request: dict[str, Any]) -> EngineTrace:
    """Sample after the sequence, compute all of it again at once, and once more from the KV cache."""
    given, recorder = request["tokens"], Recorder(engine.model)
    with recorder.recording() as sampling:
        output = engine.ask(
            given, **request["sampling"], max_tokens=request["sampled"], ignore_eos=True, logprobs=0, seed=1
        )
    sampled = list(output.outputs[0].token_ids)
    reported = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, sampled, strict=True)]
    tokens = [*given, *sampled]
    with recorder.recording() as whole:
        engine.ask(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with recorder.recording() as cached:
        engine.ask(tokens, max_tokens=1, temperature=0.0)
    hidden = whole[len(recorder.layers), points.FINAL_NORM][: len(tokens)]
    dtype = next(engine.model.parameters()).dtype
    logits = engine.model.compute_logits(hidden.to(dtype)).float().cpu()  # type: ignore[operator]
    logp = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    rows = len(tokens)
    messages = request.get("messages")
    return EngineTrace(
        tokens=tokens,
        given=len(given),
        whole={point: rows_of[:rows] for point, rows_of in whole.items()},
        decoded={point: rows_of[len(given) : rows - 1] for point, rows_of in sampling.items()},
        cached={point: rows_of for point, rows_of in cached.items() if len(rows_of) < rows},
        logp=logp,
        logits=logits[len(given) - 1 : -1],
        reported=torch.tensor(reported),
        facts=engine.facts(),
        weights=engine.worker.weight_transfer_engine.differing_weights(Path(request["files"])),
        rendered=None if messages is None else engine.rendered(messages, request["kwargs"]),
    )


def main(change: Callable[[TracedEngine], None] = lambda engine: None) -> None:
    """Trace the request's sequence. ``change`` may alter the engine before, for tests."""
    request = json.loads(Path(os.environ[REQUEST]).read_text())
    engine = TracedEngine()
    change(engine)
    torch.save(asdict(trace(engine, request)), request["output"])


if __name__ == "__main__":
    main()
