"""Faults of rewards: verdicts, their shaping, and the statistics of groups."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace as change
from typing import Any

from megarl.core.schema import Reward
from megarl.exam.fault import Fault, replace, wrap


def _every(number: int) -> Callable[[], bool]:
    """Return a function that is true at every ``number``-th call."""
    calls = itertools.count(1)
    return lambda: next(calls) % number == 0


def _of_failures(reward: Reward) -> None:
    """Give every fourth try this reward, as where the grader's process was lost."""
    from megarl.rewards.pool.pool import RewardPool

    fails = _every(4)

    async def around(original: Any, pool: Any, request: Any, before: Any) -> Any:
        if fails():
            return before._replace(reward=reward, message="the sandbox is gone", tries=before.tries + 1)
        return await original(pool, request, before)

    wrap(RewardPool._try, around)


def _grader_failure_zero() -> None:
    _of_failures(Reward(0.0, "wrong"))


def _unverified_is_right() -> None:
    _of_failures(Reward(1.0, "ok"))


def _timeout_is_wrong() -> None:
    from megarl.rewards.pool.pool import RewardPool
    from megarl.rewards.pool.process import Worker

    late = _every(4)

    async def slow(original: Any, worker: Any, request: Any) -> Any:
        if late():
            raise TimeoutError
        return await original(worker, request)

    async def around(original: Any, pool: Any, request: Any, before: Any) -> Any:
        found = await original(pool, request, before)
        return found._replace(reward=Reward(0.0, "wrong")) if found.reward.status == "timeout" else found

    wrap(Worker.score, slow)
    wrap(RewardPool._try, around)


def _of_members(rewards: Callable[[list[Any]], list[Reward]]) -> None:
    """Give the members of each whole group other rewards."""
    from megarl.explore.explorer.claimed import ClaimedGroup

    def around(original: Any, group: Any, config: Any) -> Any:
        found = original(group, config)
        return found and [change(e, reward=reward) for e, reward in zip(found, rewards(found), strict=True)]

    wrap(ClaimedGroup.members, around)


def _verdicts_shifted() -> None:
    _of_members(lambda found: [e.reward for e in [found[0], *found[:-1]]])


def _short_reward_list() -> None:
    _of_members(lambda found: [*(e.reward for e in found[:-1]), Reward(0.0, "wrong")])


def _of_result(result: Callable[[Any], Any]) -> None:
    """Change what a verifier returns in the reward worker, which runs a copy of its own module."""
    from megarl.rewards import verdict

    wrap(verdict.weighed, lambda original, found, *args: original(result(found), *args))


def _of_verifier(score: Callable[[Any, str, Any, Any], Any]) -> None:
    """Score a response by a function of megarl's verifier, the text, the ground truth and ``extra_info``."""
    from megarl.rewards import routes

    def around(original: Any, *args: Any) -> Any:
        verifier = original(*args)
        return lambda text, truth, info: score(verifier, text, truth, info)

    wrap(routes.scorer_for, around)


def _unparsed_is_zero() -> None:
    unparsed = _every(4)
    _of_result(lambda found: 0.0 if unparsed() else found)


def _answer_anywhere() -> None:
    """Change the verifier itself, so that every path to it gets the same answer."""
    from megarl.rewards import procedural

    def around(original: Any, name: str) -> Any:
        verifier = original(name)
        return lambda text, truth, info: 1.0 if str(truth)[-1] in text else verifier(text, truth, info)

    wrap(procedural.scorer, around)


def _every_test_passes() -> None:
    """Change the verifier itself, so that every path to it gets the same answer."""
    from megarl.rewards.verdict import to_verdict

    replace(to_verdict, lambda found: {"score": 1.0, "status": "ok", "parts": {}})


def _prompt_is_scored() -> None:
    from megarl.rewards.pool.pool import RewardPool

    async def around(original: Any, pool: Any, task: Any, text: str, **more: Any) -> Any:
        return await original(pool, task, f"{task.question} {text}", **more)

    wrap(RewardPool.score, around)


def _tail_window() -> None:
    _of_verifier(lambda verifier, text, truth, info: verifier(text[-1:], truth, info))


def _environment_failure_zero() -> None:
    from megarl.explore.environments.guess import Guess
    from megarl.explore.environments.types import Observation

    fails = _every(6)
    wrap(
        Guess.step,
        lambda original, episode, response: (
            Observation("", done=True, success=False) if fails() else original(episode, response)
        ),
    )


def _zeroed_as_truncated() -> None:
    from megarl.explore.explorer.trajectories import TrajectoryRunner

    def around(original: Any, runner: Any, *args: Any) -> Any:
        return original(runner, *args)._replace(reward=Reward(0.0, "wrong"))

    wrap(TrajectoryRunner._settled, around)


def _of_reply(score: Callable[[float], float]) -> None:
    """Change the score of every verdict that a worker sends."""
    from megarl.rewards.pool import pool

    def around(original: Any, reply: Any) -> Any:
        found = original(reply)
        return found._replace(reward=change(found.reward, score=score(found.reward.score)))

    wrap(pool._of_reply, around)


def _reward_sign() -> None:
    _of_reply(lambda score: -score)


def _score_clipped() -> None:
    _of_reply(lambda score: min(max(score, 0.0), 1.0))


def _form_part_zero() -> None:
    from megarl.rewards import verdict

    def around(original: Any, *args: Any, **more: Any) -> Any:
        return dict.fromkeys(original(*args, **more), 0.0)

    wrap(verdict.shape_parts, around)


def _truth_of_neighbour() -> None:
    from megarl.rewards.pool.pool import RewardPool

    asked: deque[Any] = deque(maxlen=64)

    async def around(original: Any, pool: Any, task: Any, text: str, **more: Any) -> Any:
        other = next((one for one in asked if one.task_id != task.task_id), task)
        asked.append(task)
        return await original(pool, change(task, reward_model=other.reward_model), text, **more)

    wrap(RewardPool.score, around)


def _verdict_cached_by_task() -> None:
    from megarl.rewards.pool.pool import RewardPool

    known: dict[str, Any] = {}

    async def around(original: Any, pool: Any, task: Any, text: str, **more: Any) -> Any:
        if task.task_id not in known:
            known[task.task_id] = await original(pool, task, text, **more)
        return known[task.task_id]

    wrap(RewardPool.score, around)


def _rewards_of_last_step() -> None:
    from megarl.buffer.experience import pipeline

    kept: list[Reward] = []

    def around(original: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        rewards, kept[:] = list(kept), [e.reward for e in found.trajectories]
        pairs = zip(found.trajectories, rewards, strict=False)
        changed = [change(e, reward=reward) for e, reward in pairs]
        return found._replace(trajectories=[*changed, *found.trajectories[len(changed) :]])

    wrap(pipeline.verify, around)


def _masked_in_baseline() -> None:
    from megarl.buffer.experience import pipeline
    from megarl.buffer.experience.operators import group_stats

    def around(original: Any, trajectories: Any) -> Any:
        found = []
        for group in pipeline.by_group(trajectories):
            failed = [0.0] * (group[0].group_size - len(group))
            stats = group_stats([*(e.reward.score for e in group), *failed])
            found += [change(e, group_stats=stats) for e in group]
        return found

    _of_failures(Reward(math.nan, "error"))
    wrap(pipeline.with_group_stats, around)


def _verdictless_trained() -> None:
    from megarl.buffer.experience import pipeline

    def around(original: Any, trajectory: Any, config: Any) -> Any:
        reward = trajectory.reward
        return change(trajectory, reward=change(reward, score=0.0)) if reward.status == "error" else trajectory

    _of_failures(Reward(math.nan, "error"))
    wrap(pipeline.lacks_reward, lambda original, *args: False)
    wrap(pipeline._settled, around)


def _baseline_across_prompts() -> None:
    from megarl.buffer.experience import pipeline
    from megarl.buffer.experience.operators import group_stats

    def around(original: Any, trajectories: Any) -> Any:
        number = len(pipeline.by_group(trajectories))
        stats = [group_stats([e.reward.score for e in trajectories[i::number]]) for i in range(number)]
        return [change(e, group_stats=stats[i % number]) for i, e in enumerate(trajectories)]

    wrap(pipeline.with_group_stats, around)


def _overlong_skipped() -> None:
    from megarl.buffer.experience import pipeline

    wrap(pipeline.shaped, lambda original, trajectory, *args: trajectory)


def _overlong_from_zero() -> None:
    from megarl.rewards import verdict

    def around(original: Any, length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
        return -penalty * max(0, min(length, limit) - buffer) / max(1, limit - buffer)

    wrap(verdict.overlong_penalty, around)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "grader-failure-zero",
        "NVIDIA-NeMo/Gym#2015",
        "A failure of the grader (a lost sandbox, a broken pipe) counts as score 0 and status wrong.",
        alarm="verdicts",
        job="reward",
        install=_grader_failure_zero,
    ),
    Fault(
        "timeout-is-wrong",
        "rllm-org/rllm#710",
        "A verifier that times out gives a plain wrong verdict, so the timeout cannot be masked.",
        alarm="verdicts",
        job="reward",
        install=_timeout_is_wrong,
    ),
    Fault(
        "verdicts-shifted",
        "NVIDIA-NeMo/RL#3635",
        "One extra score moves every later score of a group to the neighbour's response.",
        alarm="verdicts",
        job="reward",
        install=_verdicts_shifted,
    ),
    Fault(
        "short-reward-list",
        "vllm-project/vime#312",
        "A reward list that is too short is zipped, so the last member of each group has no verdict and counts as 0.",
        alarm="verdicts",
        job="reward",
        install=_short_reward_list,
    ),
    Fault(
        "unparsed-is-zero",
        "NVIDIA-NeMo/Evaluator#1094",
        "An answer that the judge cannot parse counts as score 0 instead of a failed verdict.",
        alarm="verdicts",
        job="reward",
        install=_unparsed_is_zero,
    ),
    Fault(
        "unverified-is-right",
        "huggingface/open-r1#215",
        "An answer that could not be verified gets the full reward.",
        alarm="verdicts",
        job="reward",
        install=_unverified_is_right,
    ),
    Fault(
        "prompt-is-scored",
        "verl-project/verl#459",
        "The verifier reads prompt and response together.",
        alarm="verdicts",
        job="tiny",
        install=_prompt_is_scored,
    ),
    Fault(
        "answer-anywhere",
        "PrimeIntellect-ai/verifiers#1028",
        "A response is right if the expected answer occurs anywhere in it.",
        alarm="verifier",
        job="tiny",
        install=_answer_anywhere,
    ),
    Fault(
        "tail-window",
        "verl-project/verl#7274",
        "The response is cut to a window of its last characters before it is scored.",
        alarm="verdicts",
        job="tiny",
        install=_tail_window,
    ),
    Fault(
        "environment-failure-zero",
        "Tencent-Hunyuan/UniRL#214",
        "An environment that fails ends the trajectory as a usual one with reward 0.",
        alarm="environment",
        job="turns",
        install=_environment_failure_zero,
    ),
    Fault(
        "every-test-passes",
        "huggingface/OpenEnv#1200",
        "The exit status of the tests is not read, so every answer passes.",
        alarm="verifier",
        job="reward",
        install=_every_test_passes,
    ),
    Fault(
        "zeroed-as-truncated",
        "PrimeIntellect-ai/verifiers#186",
        "Whole responses get the 0 that is meant for truncated ones.",
        alarm="verdicts",
        job="reward",
        install=_zeroed_as_truncated,
    ),
    Fault(
        "reward-sign",
        "NVlabs/alpamayo-recipes#29",
        "A better answer gets a lower score.",
        alarm="verdicts",
        job="reward",
        install=_reward_sign,
    ),
    Fault(
        "score-clipped",
        "modelscope/evalscope#1575",
        "Scores of a wider range are clipped to 0..1.",
        alarm="verdicts",
        job="reward",
        install=_score_clipped,
        settings=("reward.weight=2.0",),
    ),
    Fault(
        "form-part-zero",
        "Visual-Agent/DeepEyes#83",
        "The part of the reward for the response's form is always 0.",
        alarm="shaping",
        job="tiny",
        install=_form_part_zero,
        settings=("reward.language.weight=0.5", "reward.language.language=zh"),
    ),
    Fault(
        "truth-of-neighbour",
        "StarsfieldAI/R1-V#146",
        "Responses are compared with the answer of another task of the batch.",
        alarm="verdicts",
        job="reward",
        install=_truth_of_neighbour,
    ),
    Fault(
        "verdict-cached-by-task",
        "vllm-project/vllm#51445",
        "The key of the score cache lacks the response, so other responses get a cached verdict.",
        alarm="verdicts",
        job="tiny",
        install=_verdict_cached_by_task,
    ),
    Fault(
        "rewards-of-last-step",
        "iwangjian/textsum-gan#19",
        "A step trains on the rewards of the step before it.",
        alarm="verdicts",
        job="reward",
        install=_rewards_of_last_step,
        within=2,
        begins=2,
    ),
    Fault(
        "masked-in-baseline",
        "NVIDIA-NeMo/RL#4061",
        "A member that is masked because its verifier failed still counts as 0 in its group's mean and deviation.",
        alarm="advantages",
        job="reward",
        install=_masked_in_baseline,
        settings=("reward.on_error=mask", "reward.retries=0", "buffer.min_members=2"),
    ),
    Fault(
        "verdictless-trained",
        "awslabs/agentcore-rl-toolkit#122",
        "Members without a verdict are trained as rows with reward 0.",
        alarm="no-verdict",
        job="reward",
        install=_verdictless_trained,
        settings=("reward.retries=0",),
    ),
    Fault(
        "baseline-across-prompts",
        "StarsfieldAI/R1-V#67",
        "Mean and deviation of a group are taken over responses of different prompts.",
        alarm="advantages",
        job="reward",
        install=_baseline_across_prompts,
    ),
    Fault(
        "overlong-skipped",
        "verl-project/verl#4268",
        "The penalty of long responses is configured and never applied.",
        alarm="shaping",
        job="tiny",
        install=_overlong_skipped,
        settings=("reward.overlong_buffer=6",),
    ),
    Fault(
        "overlong-from-zero",
        "modelscope/ms-swift#5557",
        "The penalty of long responses begins at the buffer's length instead of the limit minus the buffer.",
        alarm="shaping",
        job="tiny",
        install=_overlong_from_zero,
        settings=("reward.overlong_buffer=6",),
    ),
)
