"""Expert ids of vLLM's requests on CPU: vLLM 0.32 collects them only in its second model runner, which needs Triton.

The collector (``AuxOutputWorkerConnector``) gets the first runner's steps instead. It stores the ids of a prompt's
cached blocks with these.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RoutingRunner(CPUModelRunner):
    """vLLM's first model runner, which also collects expert ids if ``enable_return_routed_experts`` is set."""

    _collects: Any = None
    _step: PendingAuxOutput | None = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **more)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self._collects = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        if self._collects is None:
            return super().execute_model(scheduler_output, intermediate_tensors)
        self._collects.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if scheduler_output.total_num_scheduled_tokens:
            self._step = self._collects.prepare_output(self._batch(scheduler_output.num_scheduled_tokens))
        return output

    def _batch(self, scheduled: dict[str, int]) -> SimpleNamespace:
        """Requests of the step, in the order of their rows."""
        requests = list(self.input_batch.req_ids)
        counts = [scheduled[request] for request in requests]
        return SimpleNamespace(
            req_ids=requests,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(requests)].copy(),
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        step, self._step = self._step, None
        if step is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            step.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = step.process_output()
        return output


def install() -> None:
    """Let this process's engine, or worker, on CPU collect expert ids."""
    from vllm.v1.worker import cpu_worker

    cpu_worker.CPUModelRunner = RoutingRunner
    # Refuses all runners but the second, and cases that ``run/checks/grids.py`` refuses.
    VllmConfig._verify_aux_output_compatibility = lambda self: None
