"""An agent of others, to which the rollout model is an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megarl.core.config.schema import RolloutConfig
from megarl.core.errors import describe
from megarl.core.schema import End, Reward, Task
from megarl.explore.agents import AgentServer, Session
from megarl.explore.agents.runner import load
from megarl.explore.agents.server import MODEL
from megarl.explore.rewards.verdict import NO_VERDICT, to_verdict
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.workflows.types import RolloutModel, Workflow


@asynccontextmanager
async def serving_agents(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> AsyncIterator[Workflow]:
    """Workflow of ``rollout.agent``, whose endpoint is served as long as this is entered. Raises ConfigError.

    A number or verdict that the agent returns is the reward; where it returns None, the verifier reads the last
    response. An exception of the agent costs the trajectory its verdict, unless the agent had run out of room.
    """
    run = load(rollout.agent, rollout.agent_env)

    async with AgentServer() as server:

        async def workflow(task: Task, model: RolloutModel) -> None:
            session = Session(model, tokenizer, task)
            with server.serving(session) as base_url:
                try:
                    async with asyncio.timeout(rollout.agent_timeout_s):
                        result = await run(base_url, task, _request_kwargs(rollout), _metadata(task, model))
                except TimeoutError as error:
                    timeout = f"the agent has not ended within rollout.agent_timeout_s={rollout.agent_timeout_s:g}"
                    model.fail(f"{timeout} ({error})" if str(error) else timeout, End.WORKFLOW_TIMEOUT)
                    return
                except Exception as error:
                    if session.full and model.has_response:
                        model.truncate()
                        return
                    model.fail(f"the agent failed: {describe(error)}")
                    return
            if not model.has_response:
                model.fail("the agent has asked the model for no response")
            elif result is not None or rollout.agent_rewards:
                _finish(model, result)

        yield workflow


def _finish(model: RolloutModel, result: Any) -> None:
    try:
        verdict = to_verdict(result)
    except (TypeError, ValueError) as error:
        model.fail(f"the agent returned no reward: {error}")
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
    }
