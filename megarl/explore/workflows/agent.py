"""A third-party agent, with the rollout model as its endpoint."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.core.errors import describe
from megarl.core.schema import End, Reward, Task
from megarl.explore.agents.program import load
from megarl.explore.agents.server import MODEL, ROOM, AgentServer, Session
from megarl.explore.recording.model import RolloutModel, Workflow
from megarl.rewards.verdict import NO_VERDICT, to_verdict
from megarl.tasks import ChatTokenizer


@asynccontextmanager
async def serving_agents(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> AsyncIterator[Workflow]:
    """Yield the workflow of ``rollout.agent`` while its endpoint is served. Raises ConfigError.

    A number or verdict returned by the agent is the reward; if it returns None, the verifier judges the last response.
    After an exception the trajectory has no verdict; after a refusal for lack of room it is truncated.
    """
    async with AsyncExitStack() as stack:
        socket = None
        if rollout.agent_sandbox:
            socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-agents-")), "endpoint")
        run = load(rollout, socket)
        server = await stack.enter_async_context(AgentServer(socket))

        async def workflow(task: Task, model: RolloutModel) -> None:
            session, result, error = Session(model, tokenizer, task), None, None
            limit = asyncio.timeout(rollout.agent_timeout_s)
            async with server.serving(session) as base_url:
                try:
                    async with limit:
                        result = await run(base_url, task, _request_kwargs(rollout), _metadata(task, model))
                except Exception as raised:
                    error = raised
            if limit.expired():
                timeout = f"the agent has not ended within rollout.agent_timeout_s={rollout.agent_timeout_s:g}"
                model.fail(timeout, End.WORKFLOW_TIMEOUT)
            elif error is not None and not (model.record.has_response and _is_of_room(error)):
                model.fail(f"the agent failed: {describe(error)}")
            elif session.abandoned:
                model.fail(f"the agent has not waited for {session.abandoned} of its requests", End.ABANDONED)
            elif not model.record.has_response:
                model.fail("the agent has asked the model for no response")
            elif error is not None:
                model.truncate()
                if rollout.agent_rewards:
                    model.finish(Reward(0.0, "wrong"))
            elif result is not None or rollout.agent_rewards:
                _finish(model, result, rollout)

        yield workflow


def _is_of_room(error: BaseException) -> bool:
    """Return True if an agent's exception, or its cause, is a refusal for lack of room.

    An exception handled by the agent (``__context__`` alone) is no cause.
    """
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if ROOM in str(one):
            return True
        seen.add(id(one))
        causes = one.exceptions if isinstance(one, BaseExceptionGroup) else [one.__cause__]
        left += [cause for cause in causes if cause is not None and id(cause) not in seen]
    return False


def _finish(model: RolloutModel, result: Any, rollout: RolloutConfig) -> None:
    try:
        verdict = to_verdict(result)
    except (TypeError, ValueError) as error:
        fix = (
            "return one for every trajectory (rollout.agent_rewards=true), or set rollout.agent_rewards=false: where "
            "the agent returns None, a verifier then scores the last response"
            if rollout.agent_rewards
            else "return a number, or None for the row's verifier to score the last response "
            "(rollout.agent_rewards=false)"
        )
        model.fail(f"the agent returned no reward: {error}; {fix}")
        return
    if verdict["status"] in NO_VERDICT:
        model.fail(f"the agent returned the status {verdict['status']}: {verdict.get('reason', '')}")
    else:
        model.finish(Reward(verdict["score"], verdict["status"], verdict["parts"]))


def _request_kwargs(rollout: RolloutConfig) -> dict[str, Any]:
    return {"model": MODEL, "temperature": rollout.temperature, "max_tokens": rollout.max_response_tokens}


def _metadata(task: Task, model: RolloutModel) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "ground_truth": task.reward_model.get("ground_truth"),
        "extra_info": task.extra_info,
        "index": model.index,
        "seed": model.seed,
    }
