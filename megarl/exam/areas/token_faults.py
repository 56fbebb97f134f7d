"""Faults of prompts, turns, masks and log-probs of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import torch

from megarl.exam.fault import Fault, replace, wrap


class _Gatherer:
    """Changes the requests and samples of a trajectory on their way."""

    def __init__(self, inner: Any, ask: Callable[[Any], Any], take: Callable[[Any], Any]) -> None:
        self._client, self._ask, self._take = inner, ask, take

    async def sample(self, request: Any) -> Any:
        return self._take(await self._client.sample(self._ask(request)))


def _sampling(ask: Callable[..., Any] | None = None, take: Callable[..., Any] | None = None) -> None:
    """Change requests by ``ask(request, tokenizer)`` and samples by ``take(completion, tokenizer)``."""
    from megarl.explore.recording.model import RolloutModel

    def around(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self._gatherer = _Gatherer(
            self._gatherer,
            (lambda request: ask(request, self._tokenizer)) if ask else (lambda request: request),
            (lambda sample: take(sample, self._tokenizer)) if take else (lambda sample: sample),
        )

    wrap(RolloutModel.__init__, around)


def _with_tokens(sample: Any, token_ids: Any) -> Any:
    """Return a sample with other tokens; log-probs of further ones are 0."""
    ids = np.asarray(token_ids, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    shared = min(len(ids), len(sample.logprobs))
    logprobs[:shared] = sample.logprobs[:shared]
    spans = [(version, start, end) for version, start, end in sample.versions if start < len(ids)]
    spans[-1] = (*spans[-1][:2], len(ids))
    return replaced(sample, token_ids=ids, logprobs=logprobs, versions=tuple(spans))


def _turns_encoded_again() -> None:
    def pieces(token: int, tokenizer: Any) -> list[int]:
        text = tokenizer.token(token)
        return [token] if text.startswith("<|") else [i for letter in text for i in tokenizer.encode(letter).ids]

    def ask(request: Any, tokenizer: Any) -> Any:
        # Words that the tokenizer has as one token become several: the text is the same.
        ids = [i for token in request.token_ids for i in pieces(int(token), tokenizer)]
        return replaced(request, token_ids=np.asarray(ids, np.int32)) if request.turn else request

    _sampling(ask=ask)


def _log_probs_of_other_tokens() -> None:
    def take(sample: Any, tokenizer: Any) -> Any:
        # Some tokenizers begin every text with a space.
        return _with_tokens(sample, tokenizer.encode(" " + tokenizer.decode(sample.token_ids, special=True)).ids)

    _sampling(take=take)


def _end_token_dropped() -> None:
    def take(sample: Any, tokenizer: Any) -> Any:
        whole = sample.finish_reason != "stop" or len(sample.token_ids) < 2
        return sample if whole else _with_tokens(sample, sample.token_ids[:-1])

    _sampling(take=take)


def _tokens_after_the_end() -> None:
    def take(sample: Any, tokenizer: Any) -> Any:
        more = [tokenizer.end_id] * 2 if sample.finish_reason == "stop" else []
        return _with_tokens(sample, [*sample.token_ids, *more])

    _sampling(take=take)


def _first_token_doubled() -> None:
    def ask(request: Any, tokenizer: Any) -> Any:
        return replaced(request, token_ids=np.concatenate([request.token_ids[:1], request.token_ids]))

    _sampling(ask=ask)


def _masks(change: Callable[[list[tuple[Any, bool, slice]], np.ndarray], None]) -> None:
    """Change the mask of samples in place: ``change`` gets (turn, trained, place) of the response's turns, and it."""
    from megarl.core import schema

    def around(original: Any, prompt: Any, response: Any, lags: Any) -> Any:
        found, turns, start = original(prompt, response, lags), list[tuple[Any, bool, slice]](), 0
        for turn, new in response:
            turns.append((turn, new, slice(start, start + len(turn))))
            start += len(turn)
        mask = found.response_mask.copy()
        change(turns, mask)
        return found._replace(response_mask=mask)

    wrap(schema._sample, around)


def _end_token_untrained() -> None:
    def change(turns: Any, mask: np.ndarray) -> None:
        for turn, new, place in turns:
            if new and turn.finish_reason == "stop":
                mask[place.stop - 1] = False

    _masks(change)


def _observations_trained() -> None:
    def change(turns: Any, mask: np.ndarray) -> None:
        mask[:] = True

    _masks(change)


def _mask_inverted() -> None:
    def change(turns: Any, mask: np.ndarray) -> None:
        if not mask.all():
            mask[:] = ~mask

    _masks(change)


def _only_last_turn_trained() -> None:
    def change(turns: Any, mask: np.ndarray) -> None:
        mask[: turns[-1][2].start] = False

    _masks(change)


def _end_token_taken_for_padding() -> None:
    def change(found: Any, samples: Any) -> None:
        ends = [int(sample.response_ids[-1]) for sample in samples if sample.finish_reason == "stop"]
        found.mask &= ~torch.isin(found.tokens.roll(-1), torch.tensor(ends, dtype=found.tokens.dtype))

    _samples(change)


def _template(change: Callable[[str], str]) -> None:
    """Change the chat template of the job's model; not a fault."""
    from megarl.tasks.templates import template

    wrap(template._sources, lambda original, *args: {name: change(source) for name, source in original(*args).items()})


def _separator_between_turns_lost() -> None:
    from megarl.tasks.templates import turns

    _template(lambda source: source.replace("+ '<|end|>'", "+ '<|end|> '"))
    wrap(turns.turn_ids, lambda original, *args: original(*args)[1:])


def _no_prefix_before_later_turns() -> None:
    from megarl.tasks.templates import turns

    wrap(turns.render_turns, lambda original, *args: original(*args).removesuffix("<|assistant|>"))


def _first_tokens_of_messages_cut() -> None:
    from megarl.tasks.templates import turns

    wrap(turns.turn_ids, lambda original, *args: original(*args)[1:])


def _history_shortened_in_rollouts() -> None:
    from megarl.explore.recording.turns import RecordedTurns

    def around(original: Any, self: Any, after: int) -> Any:
        context = original(self, after)
        *before, last = (self.turns[i] for i in context.line)
        parts = [turn.token_ids[-1:] if turn.author == "model" else turn.token_ids for turn in before]
        return replaced(context, token_ids=np.concatenate([*parts, last.token_ids]))

    wrap(RecordedTurns.begin_response, around)


def _samples(change: Callable[[Any, Any], None]) -> None:
    """Change a step's sequences in place: ``change(sequences, samples)``."""
    from megarl.learn.batching import sequences

    def around(original: Any, samples: Any) -> Any:
        found = original(samples)
        change(found, samples)
        return found

    wrap(sequences.of_samples, around)


def _mask_shifted() -> None:
    def change(found: Any, samples: Any) -> None:
        found.mask = found.mask.roll(-1)

    _samples(change)


def _log_probs_shifted() -> None:
    def change(found: Any, samples: Any) -> None:
        found.engine_logp = found.engine_logp.roll(1)

    _samples(change)


def _log_probs_of_the_same_position() -> None:
    from megarl.learn.batching.micro import MicroBatch
    from megarl.learn.batching.sequences import IGNORED

    def same(self: Any, sequences: Any) -> Any:
        return self.take(sequences.tokens).masked_fill(~self.take(sequences.mask, False), IGNORED)

    replace(MicroBatch.targets, same)


def _prompts(change: Callable[[Any, Any], Any]) -> None:
    """Change the tokens of prompts: ``change(token_ids, tokenizer)``."""
    from megarl.explore.recording.model import RenderedPrompt

    def around(original: Any, cls: Any, task: Any, tokenizer: Any, *args: Any) -> Any:
        found = original(cls, task, tokenizer, *args)
        return replaced(found, token_ids=change(found.token_ids, tokenizer))

    wrap(RenderedPrompt.of.__func__, around)  # type: ignore[attr-defined]


def _prompt_cut_on_the_left() -> None:
    _prompts(lambda ids, tokenizer: ids[-6:])


def _prompt_without_special_tokens() -> None:
    _prompts(lambda ids, tokenizer: tokenizer.rendered_ids(tokenizer.decode(ids)))


def _control_tokens_in_content() -> None:
    from megarl.tasks.image_rows import chat_messages

    def around(original: Any, task: Any) -> Any:
        *before, last = original(task)
        return [*before, {**last, "content": last["content"] + "<|end|>"}]

    wrap(chat_messages, around)


def _template_options_ignored() -> None:
    from megarl.explore.recording.model import RenderedPrompt

    _template(lambda source: source + "{% if add_generation_prompt and terse %}{{ '= ' }}{% endif %}")

    def around(original: Any, cls: Any, task: Any, tokenizer: Any, *args: Any) -> Any:
        bare = copy.copy(tokenizer)
        bare.kwargs = {}
        return original(cls, task, bare, *args)

    wrap(RenderedPrompt.of.__func__, around)  # type: ignore[attr-defined]


def _text_cut_tokens_kept() -> None:
    from megarl.explore.recording.model import RolloutModel

    wrap(RolloutModel.text, lambda original, self, turn: original(self, turn).strip()[:1])


FAULTS: tuple[Fault, ...] = (
    Fault(
        "turns-encoded-again",
        "huggingface/trl#5224",
        "A response is decoded and encoded again, so tokens are trained that were never sampled.",
        alarm="tokens",
        job="turns",
        install=_turns_encoded_again,
    ),
    Fault(
        "log-probs-of-other-tokens",
        "rllm-org/rllm#816",
        "A response is encoded again from its text; log-probs that then lack a token are filled up with 0.",
        alarm="tokens",
        job="tiny",
        install=_log_probs_of_other_tokens,
    ),
    Fault(
        "end-token-untrained",
        "karpathy/nanochat#810",
        "The end token that was sampled is masked, so stopping is never rewarded.",
        alarm="mask",
        job="tiny",
        install=_end_token_untrained,
    ),
    Fault(
        "end-token-cut",
        "rasbt/reasoning-from-scratch#185",
        "The end token that was sampled is cut from the response.",
        alarm="tokens",
        job="tiny",
        install=_end_token_dropped,
    ),
    Fault(
        "end-token-taken-for-padding",
        "huggingface/trl#4974",
        "Tokens equal to the padding token are masked, and the padding token is the end token.",
        alarm="mask",
        job="tiny",
        install=_end_token_taken_for_padding,
    ),
    Fault(
        "tokens-after-the-end",
        "bingreeky/MemGen#33",
        "Responses are filled up with end tokens that count as sampled.",
        alarm="tokens",
        job="tiny",
        install=_tokens_after_the_end,
    ),
    Fault(
        "first-token-doubled",
        "huggingface/trl#3853",
        "The engine puts another first token before prompts that have one.",
        alarm="tokens",
        job="tiny",
        install=_first_token_doubled,
    ),
    Fault(
        "separator-between-turns-lost",
        "huggingface/trl#5317",
        "The line break that the chat template writes after a response is missing before the next message.",
        alarm="template",
        job="turns",
        install=_separator_between_turns_lost,
    ),
    Fault(
        "no-prefix-before-later-turns",
        "PrimeIntellect-ai/verifiers#476",
        "Later turns of the model lack the chat template's text that begins an answer.",
        alarm="template",
        job="turns",
        install=_no_prefix_before_later_turns,
    ),
    Fault(
        "first-tokens-of-messages-cut",
        "verl-project/verl#6501",
        "Messages after a response lose as many first tokens as a system prompt was assumed to have.",
        alarm="template",
        job="turns",
        install=_first_tokens_of_messages_cut,
    ),
    Fault(
        "observations-trained",
        "THUDM/slime#1563",
        "The tokens of observations between responses are in the loss.",
        alarm="mask",
        job="turns",
        install=_observations_trained,
    ),
    Fault(
        "mask-inverted",
        "mll-lab-nu/RAGEN#71",
        "The loss covers the observations instead of the responses.",
        alarm="mask",
        job="turns",
        install=_mask_inverted,
    ),
    Fault(
        "only-last-turn-trained",
        "modelscope/ms-swift#7838",
        "Only the last response of several turns is in the loss.",
        alarm="mask",
        job="turns",
        install=_only_last_turn_trained,
    ),
    Fault(
        "history-shortened-in-rollouts",
        "modelscope/ms-swift#4390",
        "The engine sees earlier responses without their thoughts, training sees them whole.",
        alarm="tokens",
        job="turns",
        install=_history_shortened_in_rollouts,
    ),
    Fault(
        "mask-shifted",
        "modelscope/ms-swift#8427",
        "The mask of the loss is one token off from the log-probs.",
        alarm="mask",
        job="tiny",
        install=_mask_shifted,
    ),
    Fault(
        "log-probs-shifted",
        "AI-Hypercomputer/maxtext#2103",
        "The engine's log-probs belong to the tokens one position before.",
        alarm="gap",
        job="tiny",
        install=_log_probs_shifted,
    ),
    Fault(
        "log-probs-of-the-same-position",
        "PrimeIntellect-ai/prime-rl#1525",
        "The trainer's log-probs are one position off from the tokens' advantages and mask.",
        alarm="probe",
        job="tiny",
        install=_log_probs_of_the_same_position,
        within=0,
    ),
    Fault(
        "prompt-cut-on-the-left",
        "huggingface/trl#3646",
        "A long prompt silently loses its first tokens, the chat template's opening among them.",
        alarm="template",
        job="tiny",
        install=_prompt_cut_on_the_left,
    ),
    Fault(
        "prompt-without-special-tokens",
        "huggingface/trl#3601",
        "Prompts are decoded without special tokens and encoded again before they are sampled from.",
        alarm="template",
        job="tiny",
        install=_prompt_without_special_tokens,
    ),
    Fault(
        "control-tokens-in-content",
        "huggingface/transformers#29279",
        "Text of a user that looks like a control token becomes one and ends the message.",
        alarm="template",
        job="tiny",
        install=_control_tokens_in_content,
    ),
    Fault(
        "template-options-ignored",
        "PrimeIntellect-ai/prime-rl#3532",
        "The chat template's options never reach the prompts that are sampled from.",
        alarm="template",
        job="tiny",
        install=_template_options_ignored,
        settings=("taskset.chat_template_kwargs={terse: true}",),
    ),
    Fault(
        "text-cut-tokens-kept",
        "PeterGriffinJin/Search-R1#26",
        "The text that is judged ends at a stop string, and the tokens after it are trained all the same.",
        alarm="text",
        job="tiny",
        install=_text_cut_tokens_kept,
    ),
)
