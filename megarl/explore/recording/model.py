"""The rollout model of one trajectory, for workflows: length limits, tool calls, samples."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megarl.buffer.store import Claim
from megarl.config.derived import context_tokens, prompt_tokens
from megarl.config.schema import RolloutConfig
from megarl.core.errors import DataError, JobError, PromptRefused
from megarl.core.schema import GREEDY, Author, End, Reward, Task, Turn, WeightsSpan, WeightsVersion, text_digest
from megarl.core.text import OPEN, as_written, opens_thinking, without_surrogates
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.recording.images import ImageRules
from megarl.explore.recording.turns import RecordedEnd, RecordedTurns, recorded_limit
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.tasks.image_rows import PLACEHOLDER, placed, with_parts
from megarl.tasks.templates.turns import exceeds, messages_of, render_turns, turn_ids
from megarl.tasks.tools import FORMATS, ToolCall, written_by


@dataclass(frozen=True)
class TokenLimits:
    """Token limits; ``sys.maxsize`` for no limit."""

    prompt: int = sys.maxsize
    """Tokens of a prompt (``rollout.max_prompt_tokens``)."""
    response: int = sys.maxsize
    """Tokens of a response (``rollout.max_response_tokens``)."""
    trajectory: int = sys.maxsize
    """Tokens of a line of turns, the prompt included (``rollout.max_trajectory_tokens``)."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> TokenLimits:
        """Return the limits of the settings."""
        return cls(prompt_tokens(rollout), rollout.max_response_tokens, context_tokens(rollout))


def calls_of(
    tokenizer: ChatTokenizer, turn: Turn, in_thinking: bool, form: str | None, tools: Iterable[Mapping[str, Any]]
) -> tuple[str, list[ToolCall]]:
    """Return a turn's text around its tool calls, including the thought, and the calls. A call inside the thought is
    text.

    Args:
        in_thinking: The turn begins inside a thought.
        form: One of ``FORMATS``; None for the chat template's.
        tools: JSON schemas of the tools, which give arguments their types.

    Raises DataError if the chat template's format of calls is unknown.
    """
    found = written_by(tokenizer.template) if form is None else FORMATS[form]
    if found is None:
        raise DataError("the model's chat template writes no tool calls that megarl can read")
    written = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
    content, calls = found.parse(as_written(tokenizer.with_calls(written), in_thinking), tools)
    return content.removeprefix(OPEN) if in_thinking else content, calls


ROLES: dict[Author, str] = {"environment": "user"}
"""Author -> role of its messages in chat templates, if different."""


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
    """True if it ends inside a thought."""

    @classmethod
    def of(cls, task: Task, tokenizer: ChatTokenizer, most: int = sys.maxsize) -> RenderedPrompt:
        """Render a task by the chat template.

        Raises ValueError if the text exceeds ``most`` tokens (``rollout.max_prompt_tokens``), without tokenising the
        rest.
        """
        text = tokenizer.render(chat_messages(task), task.chat_template_kwargs)
        if exceeds(tokenizer, text, most):
            raise _too_long(most)
        token_ids = tokenizer.rendered_ids(text)
        token_ids.flags.writeable = False  # trajectories share it
        return cls(token_ids, task.images, opens_thinking(text))


class AskVerifier(Protocol):
    """Return the verdict of a text; ``by``: data source of a verifier other than the task's."""

    async def __call__(self, text: str, in_thinking: bool, by: str | None) -> Verdict: ...


NO_LIMITS, NO_OPTIONS = TokenLimits(), MappingProxyType[str, Any]({})


class RolloutModel:
    """Interface of a workflow to the rollout model, for one trajectory. Turns are recorded in ``record``, the end in
    ``end``; a workflow returns nothing.

    Args:
        claim: The group's claim; its version is assumed for engines that name none.
        index: Index of the trajectory in the group.
        seed: Seed of the group.
        judge: Returns the verdict of a text, which may begin inside a thought, by the task's verifier or a named one.
        options: ``rollout.options``.
        images: Rules for images besides the task's; None if messages have none.
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
        """User-defined settings (``rollout.options``), copied for this trajectory."""
        self._claim = claim
        self._index = index
        self._prompt = prompt
        self._seed = seed
        self._gatherer = gatherer
        self._tokenizer = tokenizer
        self._judge = judge
        self._verdicts: dict[int, Verdict] = {}
        """Index of a turn -> its verdict."""
        self._asked = 0
        """Number of requested samples."""

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far; indices do not change."""
        return self.record.turns

    @property
    def room(self) -> int:
        """Tokens left in the last line of turns (``rollout.max_trajectory_tokens``)."""
        return self.record.room_after(-1)

    @property
    def index(self) -> int:
        """Index of the trajectory in its group; ``GREEDY`` for the greedy one."""
        return self._index

    @property
    def seed(self) -> int:
        """Seed for the trajectory's randomness besides sampling, unchanged by retries. Without a sampling seed, as in
        greedy evaluations, it depends only on the task, so every evaluation gets the same episodes."""
        return episode_seed(self.group_seed, self._index)

    @property
    def group_seed(self) -> int:
        """Seed for randomness shared by all trajectories of the group."""
        return zlib.crc32(self._claim.task.task_id.encode()) if self._seed is None else self._seed

    def ask(self, task: Task, observation: str | None = None, images: Sequence[bytes] = ()) -> Turn:
        """Add the task's prompt, rendered by the chat template, with its images.

        Args:
            observation: Text after the prompt: appended to its last message if that is a user's, else a new message.
            images: Files of its images, placed as in ``add``.

        Raises ValueError if the prompt is then longer than ``rollout.max_prompt_tokens``, or the images have no room or
        do not match the observation.
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
        """Add a rendered prompt, int32 [T], that follows no turn: a rewritten context, or a sub-agent's prompt.

        Args:
            images: Files, one for each placeholder among the tokens.
            in_thinking: True if it ends inside a thought.

        Raises DataError if images and placeholders do not match.
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
        """Add a turn of another author, int32 [T], including the chat template's text around it.

        Args:
            images: As in ``begin``.
            after: Index of the turn that it follows, -1 for the last one.
            in_thinking: As in ``begin``.

        Raises as ``begin``.
        """
        return self.record.write(author, token_ids, images, after, in_thinking)

    def add(self, author: Author, *texts: str, role: str | None = None, images: Sequence[bytes] = ()) -> Turn | None:
        """Add a message after the model's turn, or several, rendered by the chat template up to the model's next turn.

        Args:
            role: Role of the messages in the chat template, if not the author's.
            images: Files, one for each ``<image>`` in the texts; placed before the first text if no text has one.

        Returns None and adds no turn if no room is left for a token of the model or for the images. Raises DataError if
        the template cannot render the message, ValueError if images and texts do not match.
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
        """Return the text of a turn without special tokens."""
        return self._tokenizer.decode(turn.token_ids)

    def written(self, turn: Turn) -> str:
        """Return the text of a model's turn for reward functions, with a ``<think>`` from the end of its prompt."""
        return as_written(self.text(turn), self.record.begins_in_thinking(turn))

    def rate(self, turn: Turn, reward: float) -> None:
        """Record the reward of one turn of the model, in addition to the trajectory's. Raises ValueError unless it is
        finite and the turn belongs to this trajectory."""
        self.record.rate(turn, reward)

    def keep(self, turn: Turn) -> None:
        """Keep only a turn of the model and its context; other turns are neither recorded nor trained. Raises
        ValueError unless the turn belongs to this trajectory."""
        self.record.keep(turn)

    def finish(self, reward: Reward) -> None:
        """Give the trajectory this reward, without the verifier. Raises ValueError after ``fail``."""
        self.end.finish(reward)

    def truncate(self) -> None:
        """End the trajectory for lack of room; its last response gets the reward. A failed trajectory stays failed."""
        self.end.truncate()

    def fail(self, reason: str, cause: End = End.WORKFLOW_ERROR) -> None:
        """Give the trajectory no verdict: the status is ``error``. The trajectory is retried ``rollout.retries``
        times."""
        self.end.check_open()
        if not self.turns:
            self.record.add_bare(self._prompt.token_ids)  # only for inspection
        self.end.fail(reason, cause)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._tokenizer.rendered_ids(without_surrogates(text)))

    def tool_calls(self, turn: Turn, form: str | None = None, tools: Tools | None = None) -> list[ToolCall]:
        """Return the tool calls of a model's turn, without those in its thought, as ``calls_of`` does. ``tools``
        defaults to the tools of the chat template."""
        if tools is None:
            tools = {**self._tokenizer.kwargs, **self._claim.task.chat_template_kwargs}.get("tools") or ()
        calls = calls_of(self._tokenizer, turn, self.record.begins_in_thinking(turn), form, tools)[1]
        self.record.count_calls(turn, len(calls))
        return calls

    async def verify(self, by: str | None = None, *, of: Turn | None = None) -> Reward:
        """Return the reward that the trajectory would get for the model's last turn.

        Args:
            by: Data source of a verifier to use instead; does not set the trajectory's reward.
            of: Another turn of the model.
        """
        if by is not None:
            turn = self.record.last_of_model() if of is None else of
            return (await self._judge(self.text(turn), self.record.begins_in_thinking(turn), by)).reward
        return (await self.verdict(of)).reward

    async def verdict(self, of: Turn | None = None) -> Verdict:
        """Return the verdict of the model's last turn, or of another; each is requested once."""
        if self.end.given is not None and of is None:
            return self.end.given
        turn = self.record.last_of_model() if of is None else of
        number = self.record.index_of(turn, "verify")
        if number not in self._verdicts:
            text = self.text(turn)
            self.record.judged[number] = text_digest(text)
            self._verdicts[number] = await self._judge(text, self.record.begins_in_thinking(turn), None)
        return self._verdicts[number]

    async def generate(self, *, after: int = -1, max_tokens: int | None = None) -> Turn:
        """Sample a turn of the model from the turns up to ``after`` (-1: the last one), and add it.

        ``max_tokens``: lower limit than ``rollout.max_response_tokens``. Raises EngineError, PromptRefused.
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
        turn = self.record.end_response(context, _model_turn(completion, self._claim.version), completion.prompt_ids)
        if completion.computed:
            self.record.check_computed(turn, completion.computed)
        check_versions(turn, completion)
        return turn


def _too_long(most: int) -> ValueError:
    return ValueError(
        f"the prompt with its first observation has more than rollout.max_prompt_tokens={most} tokens; shorten it, or "
        "raise the setting"
    )


def observed(task: Task, observation: str, images: Sequence[bytes] = ()) -> Task:
    """Return a task with an observation appended to its prompt. Raises ValueError unless it has one ``<image>`` for
    each of ``images``."""
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
    """Return the seed for one trajectory's randomness besides sampling. Seeds of later turns' samples come from longer
    sequences."""
    return int(np.random.SeedSequence([group_seed, index - GREEDY]).generate_state(1)[0])


def check_versions(turn: Turn, completion: Completion) -> None:
    """Raise JobError if a turn records other versions of its tokens than the engine has named."""
    named = [tuple(span) for span in completion.versions]
    recorded = [(str(span.version), span.start, span.end) for span in turn.spans]
    if named and all(name != "default" for name, *_ in named) and recorded != named:
        raise JobError(
            f"the engine has sampled a response with the weights {named} (version, start, end), and {recorded} are "
            "recorded: importance weights would be of other policies; look at what makes turns of completions"
        )


def _model_turn(completion: Completion, asked: WeightsVersion) -> Turn:
    """Convert a completion into a turn; without versions, the rollout's weights are assumed."""
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


Workflow = Callable[[Task, RolloutModel], Awaitable[None]]
"""``await workflow(task, model)`` makes one trajectory. The explorer runs as many concurrently as capacity allows,
passes the model's last turn to the verifier, and restarts interrupted workflows."""
