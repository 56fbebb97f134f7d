"""Checks of an evaluation that has ended: rows, weights, prompts and numbers against the stored answers, and greedy
tokens against the trainer's own forward pass.

The explorer counts an evaluation, and nobody trains on it: a wrong one disturbs nothing. So the report is compared with
the store by separate arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import first_of
from megarl.core.schema import Task, Trajectory
from megarl.learn.batching import of_demonstrations
from megarl.learn.memory.phases import Phase
from megarl.learn.models.teaching import LikeliestTokens
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.rollout.reading import NodeReader

PROMPTS = 16
"""Number of prompts of an evaluation to render again."""
GREEDY_ANSWERS, GREEDY_TOKENS = 16, 4096
"""Most answers, and tokens, of an evaluation that the trainer computes again; one answer at least."""
EQUAL = 1e-9
"""Largest difference of two sums of the same numbers."""


class StoredAnswers:
    """Counts of an evaluation's stored answers, for comparison with what it reports.

    Answers are added in parts, and not kept.
    """

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._score, self._judged = 0.0, 0
        self.versions: set[Any] = set()
        """Versions of weights that sampled tokens."""
        self.prompts: dict[str, np.ndarray] = {}
        """Task -> token ids of its prompt, of the first ``PROMPTS`` tasks without images."""

    def add(self, answers: Sequence[Trajectory]) -> None:
        """Count answers."""
        for one in answers:
            self._given[one.task_id] += 1
            self._right[one.task_id] += one.reward.status == "ok"
            if one.reward.status not in NO_VERDICT:
                self._score, self._judged = self._score + one.reward.score, self._judged + 1
            self.versions.update(span.version for turn in one.turns for span in turn.spans)
            if len(self.prompts) < PROMPTS and not one.prompt.images:
                self.prompts.setdefault(one.task_id, one.prompt.token_ids)

    def rows(self, held_out: Sequence[str], samples: int) -> str | None:
        """Return what is wrong with the rows asked; None if each held-out row was answered ``samples`` times."""
        wrong = [task for task in {**dict.fromkeys(held_out), **self._given} if self._given[task] != samples]
        known = set(held_out)
        wrong += [task for task in self._given if task not in known and task not in wrong]
        if not wrong:
            return None
        return (
            f"the taskset has {len(held_out)} held-out rows to be answered {samples} times each, and {len(wrong)} rows "
            f"have another number of answers: {first_of(wrong, 3)}"
        )

    def numbers(self, metrics: Mapping[str, float], held_out: Sequence[str], samples: int) -> str | None:
        """Return the first reported metric that is not that of the answers; None if all agree."""
        tasks = list(dict.fromkeys([*self._given, *held_out])) if held_out else list(self._given)
        right = [self._right[task] for task in self._given]
        expected: dict[str, float] = {"val/accuracy": sum(right) / max(1, samples * len(right))}
        if self._judged:
            expected["val/score"] = self._score / self._judged
        for k in range(2, samples + 1):
            expected[f"val/pass@{k}"] = sum(_one_of(k, c, samples) for c in right) / max(1, len(right))
        for name, value in expected.items():
            if name in metrics and not abs(metrics[name] - value) <= EQUAL:
                return f"{name} is reported as {metrics[name]:.6g}, and its {len(tasks)} rows' answers give {value:.6g}"
        return None

    def weights(self, steps: Mapping[Any, int], step: int) -> str | None:
        """Return what is wrong with the weights; None if all tokens have one version, of ``step`` training steps."""
        other = sorted(version for version in self.versions if steps.get(version) != step)
        if not other and len(self.versions) <= 1:
            return None
        named = ", ".join(f"{version} (of step {steps.get(version, 'unknown')})" for version in sorted(self.versions))
        return f"the evaluation of step {step} has tokens of weights {named}"

    def templates(self, render: Callable[[Task], np.ndarray], tasks: Mapping[str, Task]) -> str | None:
        """Return the first prompt that is not what the chat template makes of its row; None if all are."""
        for name, ids in self.prompts.items():
            expected = render(tasks[name])
            if not np.array_equal(ids, expected):
                return f"the prompt of {name} has {len(ids)} tokens, its row gives {len(expected)} (or other) tokens"
        return None


def _one_of(k: int, right: int, samples: int) -> float:
    """Return the probability that one of ``k`` answers, drawn without replacement, is right."""
    return 1.0 - math.prod((samples - right - i) / (samples - i) for i in range(k)) if right <= samples - k else 1.0


class EvaluationCheck:
    """Compares evaluations with the store and with the trainer's model.

    Args:
        reader: Its ``from_first`` gives rank 0's answers to all ranks.
    """

    def __init__(self, config: Config, store: Store, models: Models, memory: PhaseMemory, reader: NodeReader) -> None:
        self._config, self._store, self._models, self._memory = config, store, models, memory
        self._reader = reader

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.of(self._config)

    def alarms(self, rollout_id: str, step: int, event: Mapping[str, Any]) -> dict[str, str]:
        """Return alarm -> text for an evaluation that has ended, on rank 0.

        Args:
            step: Training steps in the evaluated weights.
            event: Data of its event, as reported.
        """
        store, samples, found = self._store, event["samples"], StoredAnswers()
        for part in store.groups.parts(store.groups.ids(rollout_id)):
            found.add(store.groups.read(part))
        held_out = store.tasks.ids("eval")
        texts = {
            "eval-rows": found.rows(held_out, samples),
            "eval-weights": found.weights(store.pacing.version_steps(list(found.versions)), step),
            "eval-count": found.numbers(event["metrics"], held_out, samples),
        }
        if self._config.rollout.workflow in ("single_turn", "tools"):  # others write their own first messages
            tasks = store.selection.tasks_named(list(found.prompts))
            texts["template"] = found.templates(self._render, tasks)
        return {name: text for name, text in texts.items() if text is not None}

    def _render(self, task: Task) -> np.ndarray:
        return self._tokenizer.prompt_ids(chat_messages(task), task.chat_template_kwargs)

    def greedy_gap(self, rollout_id: str) -> float | None:
        """Return the nats by which tokens of greedy answers are less likely than the trainer's likeliest, on average;
        None if answers are sampled, or have other weights than the actor's. Every rank calls it, with the evaluated
        weights in the actor."""
        config = self._config
        is_greedy = config.evaluation.temperature == 0.0 and config.evaluation.average is None
        if not is_greedy or config.alarms.greedy is None or config.rollout.is_colocated:
            return None
        pairs = self._reader.from_first(lambda: self._few(rollout_id))
        if not pairs:
            return None
        sequences, head = of_demonstrations(pairs), self._models.head
        model, top = self._models.actor.model, torch.zeros(len(sequences.tokens), 2)
        with self._memory.during(Phase.SYNC):  # the actor is there
            batches = [model.micro_batches(sequences)]
            columns = LikeliestTokens(1, head.vocab_size)
            logp = model.outputs(sequences, batches, temperature=1.0, columns=columns, more=top)
        sequences.add_up(top)
        return float((top[:, 1] - logp)[sequences.mask].double().mean())

    def _few(self, rollout_id: str) -> list[tuple[np.ndarray, np.ndarray]]:
        groups = self._store.groups
        ids, pairs = groups.ids(rollout_id), list[tuple[np.ndarray, np.ndarray]]()
        for group_id in ids[:: max(1, len(ids) // GREEDY_ANSWERS)][:GREEDY_ANSWERS]:
            for answer in groups.read([group_id])[:1]:
                if any(turn.images for turn in answer.turns) or not answer.response_length:
                    continue
                pairs.append(answer.answered())
                if sum(len(context) + len(response) for context, response in pairs) > GREEDY_TOKENS:
                    return pairs[: max(1, len(pairs) - 1)]
        return pairs
