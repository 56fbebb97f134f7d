"""The rollout model in one trajectory, as a workflow sees it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megarl.buffer.store import Claim
from megarl.core.errors import PromptRefused
from megarl.core.schema import GREEDY, Author, End, Reward, Task, Turn, WeightsSpan, WeightsVersion
from megarl.core.text import without_surrogates
from megarl.core.thoughts import as_written, opens_thinking
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.recording.end import RecordedEnd
from megarl.explore.recording.images import ImageRules
from megarl.explore.recording.limits import TokenLimits
from megarl.explore.recording.recorded_calls import calls_of
from megarl.explore.recording.recorded_values import recorded_limit
from megarl.explore.recording.turns import RecordedTurns
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.tasks.images.rows import PLACEHOLDER, placed, with_parts
from megarl.tasks.templates.turns import exceeds, messages_of, render_turns, turn_ids
from megarl.tasks.tools import ToolCall

ROLES: dict[Author, str] = {"environment": "user"}
"""Authors whose messages chat templates know under another role."""


IMAGE_LIMITS = "rollout.max_images, trainer.max_patches_per_micro_batch or 32 MiB allow"
"""Limits of a trajectory's images, for messages."""


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""


class Sampler(Protocol):
    """Part of ``engine.client.gather.Gatherer``."""

    async def sample(self, request: SampleRequest) -> Completion: ...


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """A task's prompt, rendered once for all trajectories of its group."""

    token_ids: np.ndarray
    """int32 [P], with one placeholder for each image."""
    images: tuple[bytes, ...]
    in_thinking: bool
    """It ends inside a thought."""

    @classmethod
    def of(cls, task: Task, tokenizer: ChatTokenizer, most: int = sys.maxsize) -> RenderedPrompt:
        """Render a task by the chat template.

        Raises ValueError for a long text of more than ``most`` tokens (``rollout.max_prompt_tokens``), of which no more
        is tokenised than shows that.
        """
        text = tokenizer.render(chat_messages(task), task.chat_template_kwargs)
        if exceeds(tokenizer, text, most):
            raise _too_long(most)
        token_ids = tokenizer.rendered_ids(text)
        token_ids.flags.writeable = False  # trajectories share it
        return cls(token_ids, task.images, opens_thinking(text))


class AskVerifier(Protocol):
    """Verdict of a text; ``by``: data source of another verifier than the task's."""

    async def __call__(self, text: str, in_thinking: bool, by: str | None) -> Verdict: ...


NO_LIMITS, NO_OPTIONS = TokenLimits(), MappingProxyType[str, Any]({})


class RolloutModel:
    """The rollout model in one trajectory, as a workflow acts with it. The turns are kept in ``record``, the end in
    ``end``, so a workflow returns nothing.

    Args:
        claim: The group's; its version is that of engines which name none.
        index: Of the trajectory in the group.
        seed: The group's.
        judge: Verdict of a text, which may begin inside a thought, by the verifier of its task or one that is named.
        options: ``rollout.options``.
        images: Rules of images beside the task's; None where messages have none.
    """

    def __init__(
        self,
        claim: Claim,
        index: int,
        prompt: RenderedPrompt,
        seed: int | None,
        gatherer: Sampler,
        tokenizer: ChatTokenizer,
        judge: AskVerifier,
        limits: TokenLimits = NO_LIMITS,
        options: Mapping[str, Any] = NO_OPTIONS,
        images: ImageRules | None = None,
    ) -> None:
        self.end = RecordedEnd()
        self.record = RecordedTurns(self.end, tokenizer.largest_id, limits.trajectory, images)
        self.limits = limits
        self.options = deepcopy(dict(options))
        """Settings of the user's own (``rollout.options``), a copy for this trajectory."""
        self._claim = claim
        self._index = index
        self._prompt = prompt
        self._seed = seed
        self._gatherer = gatherer
        self._tokenizer = tokenizer
        self._judge = judge
        self._verdicts: dict[int, Verdict] = {}
        """By the index of the turn."""
        self._asked = 0
        """Samples that were asked for."""

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far; an index stays what it is."""
        return self.record.turns

    @property
    def room(self) -> int:
        """Tokens that the last line of turns may still get (``rollout.max_trajectory_tokens``)."""
        return self.record.room_after(-1)

    @property
    def index(self) -> int:
        """Index of the trajectory in its group; ``GREEDY`` for the greedy one."""
        return self._index

    @property
    def seed(self) -> int:
        """Seed for what is random in the trajectory beside its samples, the same when it begins again. Where sampling
        has none, as in a greedy evaluation, it is the task's: every evaluation meets the same episodes."""
        return episode_seed(self.group_seed, self._index)

    @property
    def group_seed(self) -> int:
        """Seed for what all trajectories of the group have in common."""
        return zlib.crc32(self._claim.task.task_id.encode()) if self._seed is None else self._seed

    def ask(self, task: Task, observation: str | None = None, images: Sequence[bytes] = ()) -> Turn:
        """Add the task's prompt, rendered by the chat template, with its images.

        Args:
            observation: Text that follows the prompt: in its last message where that is a user's, else as one.
            images: Files of its images, placed as of ``add``.

        Raises ValueError where the prompt is then longer than ``rollout.max_prompt_tokens``, or the images have no room
        or do not fit the observation.
        """
        if self.turns:
            raise ValueError("a trajectory begins with the task of its group, which has been asked already")
        if (task.task_id, task.prompt) != (self._claim.task.task_id, self._claim.task.prompt):
            raise ValueError("ask takes the task that the workflow was given, unchanged; begin takes other prompts")
        if observation is not None:
            shown = observed(task, observation, images)
            self._prompt = prompt = RenderedPrompt.of(shown, self._tokenizer, self.limits.prompt)
            if images and not self.record.takes_images(prompt.images):
                raise ValueError(f"{len(prompt.images)} images of the prompt are more than {IMAGE_LIMITS}")
            if self.record.length_of(prompt.token_ids, prompt.images) > self.limits.prompt:
                raise _too_long(self.limits.prompt)
        prompt = self._prompt
        return self.record.add("user", prompt.token_ids, prompt.images, -1, prompt.in_thinking)

    def begin(self, token_ids: np.ndarray, *, images: Sequence[bytes] = (), in_thinking: bool = False) -> Turn:
        """Add a rendered prompt, int32 [T], that follows no turn: a context that was rewritten, or a sub-agent's.

        Args:
            images: Files, one for each placeholder among the tokens.
            in_thinking: It ends inside a thought.

        Raises DataError where images and placeholders do not fit together.
        """
        return self.record.begin(token_ids, images, in_thinking)

    def write(
        self,
        author: Author,
        token_ids: np.ndarray,
        *,
        images: Sequence[bytes] = (),
        after: int = -1,
        in_thinking: bool = False,
    ) -> Turn:
        """Add a turn of another author, int32 [T], with all that the chat template puts around it.

        Args:
            images: As of ``begin``.
            after: Index of the turn that it follows, -1 for the last one.
            in_thinking: As of ``begin``.

        Raises as ``begin``.
        """
        return self.record.write(author, token_ids, images, after, in_thinking)

    def add(self, author: Author, *texts: str, role: str | None = None, images: Sequence[bytes] = ()) -> Turn | None:
        """Add a message after the model's turn, or several, rendered by the chat template up to where the model goes
        on.

        Args:
            role: Of the messages in the chat template, where it is not the author's.
            images: Files, one for each ``<image>`` in the texts; before the first text where none has an ``<image>``.

        None, adding nothing, where it leaves no room for a token of the model, or images have none. Raises DataError
        where the template has no place for such a message, ValueError where the images do not fit the texts.
        """
        assert self.turns[-1].author == "model", "a message follows a response"
        if not self.record.takes_images(images, -1):
            self.truncate()
            return None
        messages = messages_of(role or ROLES.get(author, author), placed(texts, images))
        messages = with_parts(messages) if images else messages
        rendered = render_turns(self._tokenizer, messages, self._claim.task.chat_template_kwargs)
        if not exceeds(self._tokenizer, rendered, self.room):
            token_ids = turn_ids(self._tokenizer, rendered, int(self.turns[-1].token_ids[-1]))
            if self.record.length_of(token_ids, images) < self.room:
                return self.write(author, token_ids, images=images, in_thinking=opens_thinking(rendered))
        self.truncate()
        return None

    def text(self, turn: Turn) -> str:
        """Text of a turn without special tokens."""
        return self._tokenizer.decode(turn.token_ids)

    def written(self, turn: Turn) -> str:
        """Text of a turn of the model with the ``<think>`` that its prompt ended with, as reward functions get it."""
        return as_written(self.text(turn), self.record.begins_in_thinking(turn))

    def rate(self, turn: Turn, reward: float) -> None:
        """Keep the reward of one turn of the model, beside that of the trajectory. Raises ValueError unless it is a
        finite number, and the turn one of this trajectory's."""
        self.record.rate(turn, reward)

    def keep(self, turn: Turn) -> None:
        """Keep a turn of the model and those that it follows. Others are neither recorded nor trained. Raises
        ValueError unless the turn is one of this trajectory's."""
        self.record.keep(turn)

    def finish(self, reward: Reward) -> None:
        """Give the trajectory this reward; the verifier is not asked. Raises ValueError after ``fail``."""
        self.end.finish(reward)

    def truncate(self) -> None:
        """End the trajectory for want of room; the reward is that of its last response. One that has failed stays
        failed."""
        self.end.truncate()

    def fail(self, reason: str, cause: End = End.WORKFLOW_ERROR) -> None:
        """Give the trajectory no verdict: the status is ``error``. It begins again ``rollout.retries`` times."""
        self.end.check_open()
        if not self.turns:
            self.record.add_bare(self._prompt.token_ids)  # of no use but to be looked at
        self.end.fail(reason, cause)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._tokenizer.rendered_ids(without_surrogates(text)))

    def tool_calls(self, turn: Turn, form: str | None = None, tools: Tools | None = None) -> list[ToolCall]:
        """Return the tool calls of a model's turn, without those in its thought, as ``calls_of`` does. ``tools``
        defaults to the tools of the chat template."""
        if tools is None:
            tools = {**self._tokenizer.kwargs, **self._claim.task.chat_template_kwargs}.get("tools") or ()
        return calls_of(self._tokenizer, turn, self.record.begins_in_thinking(turn), form, tools)[1]

    async def verify(self, by: str | None = None, *, of: Turn | None = None) -> Reward:
        """Reward of the model's last turn, as the trajectory would get it.

        Args:
            by: Another data source, whose verifier is asked instead; the trajectory's own reward stays to be found.
            of: Another turn of the model.
        """
        if by is not None:
            turn = self.record.last_of_model() if of is None else of
            return (await self._judge(self.text(turn), self.record.begins_in_thinking(turn), by)).reward
        return (await self.verdict(of)).reward

    async def verdict(self, of: Turn | None = None) -> Verdict:
        """Verdict of the model's last turn, or of another, asked for once."""
        if self.end.given is not None and of is None:
            return self.end.given
        turn = self.record.last_of_model() if of is None else of
        number = self.record.index_of(turn, "verify")
        if number not in self._verdicts:
            self._verdicts[number] = await self._judge(self.text(turn), self.record.begins_in_thinking(turn), None)
        return self._verdicts[number]

    async def generate(self, *, after: int = -1, max_tokens: int | None = None) -> Turn:
        """Sample a turn of the model from the turns up to ``after`` (-1: the last one), and add it.

        ``max_tokens``: where fewer than ``rollout.max_response_tokens``. Raises EngineError, PromptRefused.
        """
        assert self.turns, "nothing has been asked"
        max_tokens = recorded_limit(max_tokens)
        context = self.record.begin_response(after)
        request = SampleRequest(
            self._claim.group_id,
            self._index,
            self._claim.num_samples,
            context.token_ids,
            context.images,
            self._seed,
            turn=self._asked,
            max_tokens=max_tokens,
            routed=context.routed,
        )
        self._asked += 1
        try:
            completion = await self._gatherer.sample(request)
        except PromptRefused:
            self.record.refuse_response()
            raise
        turn = _model_turn(completion, self._claim.version)
        return self.record.end_response(context, turn, completion.prompt_ids)


def _too_long(most: int) -> ValueError:
    return ValueError(
        f"the prompt with its first observation has more than rollout.max_prompt_tokens={most} tokens; shorten it, or "
        "raise the setting"
    )


def observed(task: Task, observation: str, images: Sequence[bytes] = ()) -> Task:
    """A task whose prompt goes on with an observation. Raises ValueError where that has another number of ``<image>``
    than ``images``."""
    if task.images and not images and PLACEHOLDER in observation:
        raise ValueError(f"a first observation has {PLACEHOLDER!r}, which stands for an image of the task")
    if images and not task.images and any(PLACEHOLDER in str(message.get("content")) for message in task.prompt):
        raise ValueError(f"the task's prompt has {PLACEHOLDER!r} and no images, and an observation has some")
    [observation] = placed([without_surrogates(observation)], images)
    *before, last = task.prompt
    if last["role"] != "user" or not isinstance(last["content"], str):
        prompt = (*task.prompt, {"role": "user", "content": observation})
    else:
        content = "\n\n".join(text for text in (last["content"], observation) if text)
        prompt = (*before, {**last, "content": content})
    return replace(task, prompt=prompt, images=(*task.images, *images))


def episode_seed(group_seed: int, index: int) -> int:
    """Seed for what is random in one trajectory beside its samples. Samples of later turns have longer sequences."""
    return int(np.random.SeedSequence([group_seed, index - GREEDY]).generate_state(1)[0])


def _model_turn(completion: Completion, asked: WeightsVersion) -> Turn:
    """A completion as a turn; an engine that names no weights ran with those that the rollout was asked for."""
    spans = completion.versions or [("default", 0, len(completion.token_ids))]
    return Turn(
        "model",
        completion.token_ids,
        logp=completion.logprobs,
        spans=tuple(
            WeightsSpan(start, end, asked if version == "default" else WeightsVersion.parse(version))
            for version, start, end in spans
        ),
        finish_reason=completion.finish_reason,
        routing=completion.routing,
    )
