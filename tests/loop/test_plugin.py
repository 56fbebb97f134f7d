"""What megarl's plugin changes in vLLM's processes."""

from __future__ import annotations

from inspect import signature

from megarl.engines.sync import plugin


def test_workers_on_cpu_wait_asleep() -> None:
    """vLLM's own would look for a call without pause for a second after each, and lose wake-ups for five."""
    from vllm.distributed.device_communicators import shm_broadcast

    for _ in range(2):
        plugin.wait_for_calls()
    reader = signature(shm_broadcast.SpinCondition.__init__).parameters["busy_loop_s"]
    assert reader.default == plugin.SPIN_S <= 0.01
    queue = shm_broadcast.MessageQueue.ReadTimeoutWithWarnings(None, should_warn=False)
    assert queue.timeout_ms() == plugin.LOOK_MS
