"""Runs a function on every rank of a gloo world, in processes that a server forks with everything imported."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from megarl.core.jobs import ProcessKind
from megarl.run.process import ports
from megarl.run.process.process import COMMON
from megarl.run.process.process import PRELOAD as OF_KINDS

PRELOAD = [
    *COMMON,
    *OF_KINDS[ProcessKind.TRAINER],
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
    "transformers.models.ernie4_5.configuration_ernie4_5",
    "transformers.models.llama.configuration_llama",
    "transformers.models.mistral.configuration_mistral",
    "transformers.models.mixtral.configuration_mixtral",
    "transformers.models.qwen2.configuration_qwen2",
    "transformers.models.qwen3.configuration_qwen3",
    "transformers.models.qwen3_5.configuration_qwen3_5",
    "transformers.models.qwen3_5_moe.configuration_qwen3_5_moe",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
    "transformers.models.qwen3_next.configuration_qwen3_next",
    "megarl.learn.training.model",
    "megatron.core.models.gpt",
    "tests.loop.vision_models",
    "tests.parallel.families",
    "tests.parallel.grid",
    "tests.parallel.parity",
    "encodings.idna",
    "torch.profiler._cupti_monitor",
    "megarl.learn.models.attention",
    "megarl.learn.models.delta",
    "megarl.learn.models.head",
    "megarl.learn.models.routing_replay",
    "megarl.learn.models.vision",
    "megarl.learn.parallel.process_groups",
    "huggingface_hub.serialization",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "psutil",
    "megarl.learn.models.experts",
    "hypothesis",
    "pytest",
]
"""What a rank imports, the parts that Megatron, megarl and transformers import only where they are used among them.

The first configuration that transformers reads costs a rank four seconds of imports, where it is not here.
"""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    args: tuple[Any, ...],
    results: Any,
    ended: Any,
    timeout_s: float,
    stacks: str,
    gpus: bool,
) -> None:
    faulthandler.enable(open(stacks, "a"))  # noqa: SIM115 - it stays open as long as this process
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    if not gpus:  # as the supervisor does for parallel.backend=gloo
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    gc.freeze()  # modules stay, and take long to walk
    try:
        # Pickled here: torch would otherwise pass tensors by handles that die with this process.
        results.put((rank, pickle.dumps(function(rank, *args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    ended.wait(timeout_s)  # rank 0 has the store, which the others may still ask when its function has returned
    for child in multiprocessing.active_children():  # a checkpoint's writers would outlive this process
        child.kill()
    os._exit(0)  # Megatron and gloo leave threads that an ordinary exit would wait for


def run_grid(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 280.0, gpus: bool = False
) -> list[Any]:
    """``[function(rank, *args) for rank in range(world)]``, each in its own process; the first traceback is raised.

    ``gpus``: they may see those that the machine has. Raises AssertionError with the stacks of the ranks that are still
    running where none returned for ``timeout_s``.
    """
    context = multiprocessing.get_context("spawn") if gpus else _context  # no GPU in a fork of who has counted them
    results, ended = context.Queue(), context.Event()
    [port] = ports.choose("127.0.0.1", 1, None)
    with tempfile.NamedTemporaryFile("r") as stacks:
        processes = [
            context.Process(
                target=_rank_main, args=(function, r, world, port, args, results, ended, timeout_s, stacks.name, gpus)
            )
            for r in range(world)
        ]
        for p in processes:
            p.start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < world:
                rank, value, error = results.get(timeout=timeout_s)
                if error is not None:
                    died = {r: p.exitcode for r, p in enumerate(processes) if p.exitcode not in (None, 0)}
                    cause = f"before it, ranks died by themselves {died}:\n{stacks.read()}\n" if died else ""
                    raise AssertionError(f"{cause}rank {rank} of {world} failed:\n{error}")
                answers[rank] = pickle.loads(value)
        except queue.Empty:
            waiting = [r for r in range(world) if r not in answers]
            for r in waiting:
                _abort(processes[r])
            raise AssertionError(f"no result of ranks {waiting} for {timeout_s:g} s:\n{stacks.read()}") from None
        finally:
            ended.set()
            for p in processes:
                if len(answers) < world:
                    p.kill()
                p.join(10)
    return [answers[r] for r in range(world)]


def _abort(process: Any) -> None:
    """End a rank by the signal at which faulthandler writes the stacks of its threads."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        process.join(10)
