"""A real vLLM engine within this process, behind megarl's own control: all of a sync but HTTP, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.config.lora import LoraConfig
from megarl.core.errors import EngineError
from megarl.engines.client.control import EngineControl, failures
from megarl.engines.client.names import EIGHT_BITS, PLUGIN
from megarl.run.supervise.process_specs import adapter_options

_STEPS = {
    "/init_weight_transfer_engine": "init_weight_transfer_engine",
    "/start_weight_update": "start_weight_update",
    "/update_weights": "update_weights",
    "/finish_weight_update": "finish_weight_update",
}


class LocalEngine:
    """vLLM's engine, core, scheduler and worker in this process; what a server's routes do with them.

    Args:
        path: Model directory.
        eight_bits: Keep linear layers in 8 bits, and the rest in bfloat16 in place of float32.
        lora: Adapters that the engine has of its own.
    """

    def __init__(self, path: Path, *, eight_bits: bool = False, lora: LoraConfig | None = None) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        quantisation: dict[str, Any] = (
            {"quantization": "online", "quantization_config": json.loads(json.dumps(EIGHT_BITS))} if eight_bits else {}
        )
        adapters: dict[str, Any] = {}
        if lora is not None:
            from megarl.engines.sync import one_adapter

            one_adapter.install()
            _, _, max_loras, _, largest, _, *layers = adapter_options(str(path), lora)
            adapters = {"enable_lora": True, "max_loras": int(max_loras), "max_lora_rank": int(largest)}
            adapters["lora_target_modules"] = layers
        self.llm = LLM(
            str(path), dtype="bfloat16" if eight_bits else "float32", **quantisation, **adapters,
            max_model_len=192, max_num_batched_tokens=8192, max_num_seqs=8, block_size=32,
            kv_cache_memory_bytes=2**24, enforce_eager=True, enable_chunked_prefill=False,
            distributed_executor_backend="uni", weight_transfer_config=WeightTransferConfig(backend=PLUGIN),
            worker_extension_cls="megarl.engines.sync.receiver.WorkerExtension",
            logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
        )  # fmt: skip
        self.refusing: str | None = None
        self.paused = False
        [self.worker] = self.llm.collective_rpc(lambda worker: worker)
        self.tamper: Callable[[str, Any], Any] = lambda path, answer: answer
        """Changes the engine's answers; raises nothing."""
        self.skipped: set[str] = set()
        """Paths that are answered and not carried out."""
        self.version_of: Callable[[str], str] = lambda version: version
        """Version under which an update ends."""

    @property
    def receiver(self) -> Any:
        return self.worker.weight_transfer_engine

    @property
    def model(self) -> Any:
        return self.receiver.model

    def receiver_digests(self) -> dict[str, str]:
        """The worker's answer to ``megarl_digests`` of now."""
        [found] = self.llm.llm_engine.collective_rpc("megarl_digests")
        return found

    def answer(self, path: str, body: Any, *, proving: bool = False) -> Any:
        """Answer of the route at ``path``; ``proving``: to a request that proves the weights. Raises EngineError where
        the server would not answer 200."""
        path, _, query = path.partition("?")
        if path in _STEPS:
            kwargs = {name: value for name, value in (body or {}).items() if name != "weight_version"}
            if path == "/finish_weight_update":
                self.llm.llm_engine.set_weight_version(self.version_of(body["weight_version"]))
            self.llm.llm_engine.collective_rpc(_STEPS[path], kwargs=kwargs)
            if failed := failures(self.llm.llm_engine.collective_rpc("megarl_outcome")):
                raise EngineError(f"the local engine answered 500 to POST {path}: {failed}")
            return None
        if path == "/megarl/state":
            return {
                "version": self.llm.llm_engine.get_weight_version(), "paused": self.paused, "refusing": self.refusing,
                "start": 1, "workers": 1,
            }  # fmt: skip
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return None
        if path == "/megarl/refuse":
            self.refusing = body["reason"]
            return None
        if path == "/reset_prefix_cache":
            return {"success": path in self.skipped or self.llm.llm_engine.reset_prefix_cache("true" in query)}
        if path == "/collective_rpc":
            return {"results": self.llm.llm_engine.collective_rpc(body["method"], args=tuple(body["args"]))}
        assert path == "/inference/v1/generate", path
        return self._generate(body, proving)

    def _generate(self, body: Any, proving: bool) -> Any:
        from vllm import SamplingParams

        if self.refusing is not None and not proving:
            raise EngineError(f"the local engine answered 503: {self.refusing}")
        assert not self.paused, "a server would wait"
        sampling = SamplingParams(**body["sampling_params"])
        [output] = self.llm.generate([{"prompt_token_ids": body["token_ids"]}], sampling, use_tqdm=False)
        [completion] = output.outputs
        tokens = list(completion.token_ids)
        content = [{"logprob": entry[token].logprob} for entry, token in zip(completion.logprobs, tokens, strict=True)]
        prompt = [
            None if entry is None else {str(token): {"logprob": found.logprob} for token, found in entry.items()}
            for entry in output.prompt_logprobs
        ]
        return {"prompt_logprobs": prompt, "choices": [{"token_ids": tokens, "logprobs": {"content": content}}]}


class LocalControl(EngineControl):
    """``EngineControl`` of a local engine: requests and answers travel as JSON, without HTTP."""

    engine: LocalEngine
    """The one of this process."""

    def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        asked = json.loads(json.dumps(body))
        answer = self.engine.tamper(path, self.engine.answer(path, asked, proving=self.proving))
        return json.loads(json.dumps(answer))

    def health(self, timeout_s: float) -> None:
        """Return at once."""
