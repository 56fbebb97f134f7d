"""Settings of rewards: verifiers and their processes, the sandbox, the judge, and rewards for how an answer is
written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megarl.config.bounds import Bound, Coefficient, Count, NonNegative, RewardWeight, Seconds, Temperature


@dataclass(frozen=True)
class CodeConfig:
    """Programs, run in a sandbox (docs/sandbox.md)."""

    url: str | None = None
    """A ``megarl sandbox serve``, whose key is in MEGARL_SANDBOX_KEY; None is this machine's own sandbox."""
    python: str | None = None
    """The interpreter for programs, with its packages; None takes megarl's, or /usr/bin/python3 where others cannot
    read that."""
    score: Literal["all", "fraction"] = "all"
    """1 when every test passes and 0 at the first that fails; or all tests run, and their share that passes."""
    cpu_s: Annotated[int, Bound(1, 3600)] = 4
    """Processor seconds of one test; assertions share a process, which has this times their number."""
    wall_s: Annotated[float, Bound(0, 3600, above=True)] = 6.0
    """Seconds of one test; also of each assertion, and of the program's import before them."""
    item_s: Annotated[float, Bound(0, 3600, above=True)] = 8.0
    """Seconds of all tests of an answer; below ``reward.timeout_s``, so that a slow program is judged and not only its
    worker killed."""
    memory_mib: Annotated[int, Bound(16, 2**20)] = 1024
    """Memory of one test; of all assertions of an answer together."""


JUDGE_IS_ROLLOUT = "rollout"
"""``reward.judge.url`` of the job's own engines."""


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that judges responses, at any OpenAI-compatible server (docs/judge.md)."""

    url: str | None = None
    """The server's base URL (http://HOST:PORT/v1), whose key is in MEGARL_JUDGE_KEY; ``rollout`` is the job's own
    engines."""
    model: str | None = None
    """Its name there; None asks the server for the first that it has."""
    rubric: str | None = None
    """A text file with {question}, {answer} and, where there is one, {reference}; None takes megarl's own."""
    votes: Annotated[int, Bound(1, 101)] = 1
    """Judgements of a response, each with a seed of its own; the majority decides, a tie is wrong. More than one needs
    a temperature."""
    temperature: Temperature = 0.0
    """Temperature of the judge; 0 is greedy."""
    max_tokens: Count = 1024
    """Longest judgement."""
    concurrency: Annotated[int, Bound(1, 4096)] = 32
    """Requests under way at once."""
    timeout_s: Seconds = 120.0
    """Seconds for one request to the judge."""
    retries: Annotated[int, Bound(0, 100)] = 3
    """Times that a failed request is repeated."""
    cache: str | None = None
    """SQLite file of judgements already made (configs/train.yaml: in the run's directory); None keeps none."""


@dataclass(frozen=True)
class FormatConfig:
    """1 for a response of the wanted form, else 0 (DeepSeek-R1, 2501.12948 §2.2.2)."""

    weight: RewardWeight = 0.0
    """Weight of this part in the reward; 0 leaves it out."""
    form: Literal["think", "think_answer"] = "think_answer"
    """<think>…</think> and then text, or then <answer>…</answer>; each tag once, in order, nothing outside."""


@dataclass(frozen=True)
class LengthConfig:
    """k1.5's reward for being short among the responses of a group (2501.12599 §2.3.3)."""

    weight: RewardWeight = 0.0
    """Weight of this part in the reward; 0 leaves it out."""
    warmup_steps: NonNegative = 0
    """Steps without it at the start."""


@dataclass(frozen=True)
class RepetitionConfig:
    """The share of a response's n-grams of words that occur earlier in it, as a number from -1 to 0 (Open-R1)."""

    weight: RewardWeight = 0.0
    """Weight of this part in the reward; 0 leaves it out."""
    ngram: Annotated[int, Bound(1, 100)] = 4
    """Words of an n-gram."""


@dataclass(frozen=True)
class LanguageConfig:
    """The share of a response's words that are of one language (DeepSeek-R1, 2501.12948 §2.3.2)."""

    weight: RewardWeight = 0.0
    """Weight of this part in the reward; 0 leaves it out."""
    language: Literal["prompt", "en", "zh"] = "prompt"
    """``prompt``: that of the question."""


@dataclass(frozen=True)
class RewardConfig:
    path: str | None = None
    """A Python file with verl's ``compute_score``; None uses ``megarl.rewards.compute_score``."""
    routes: dict[str, str] = field(default_factory=dict)
    """Prefix of ``data_source`` -> family of verifiers, or family/subtype, before megarl's own
    (``megarl.rewards.routes``), e.g. {my_set: math, my_images: vision/count}."""
    weight: RewardWeight = 1.0
    """Weight of the verifier's score in the sum of all parts."""
    workers: Annotated[int, Bound(1, 1024)] = 1
    """Processes that verify beside the explorer."""
    hosts: list[str] = field(default_factory=list)
    """HOST:PORT*N: N further processes, at a ``megarl rewards serve`` on another node."""
    timeout_s: Seconds = 10.0
    """Seconds for the verdict of one response; then its worker is killed."""
    retries: Annotated[int, Bound(0, 100)] = 1
    """Times that a response without a verdict (error, timeout) is tried again. The death of its worker is no try."""
    max_kills: Annotated[int, Bound(1, 100)] = 3
    """A response whose worker has died or hung so often is tried no more, and is an error wherever it comes again."""
    backlog: Count = 8192
    """Answers that may wait for their score; when there are more, no further group is begun."""
    on_error: Literal["drop", "zero", "mask"] = "drop"
    """Treatment of a response without a verdict: its group is dropped from training, its score counts as 0 (the
    verifier's errors and timeouts alone), or it is left out of the loss and of its group's statistics. Always
    reported."""
    late_steps: NonNegative | None = None
    """Steps after which a group that was asked for and still awaits rewards (data sources of the family ``late``) is
    left out; null waits for them (docs/rewards.md)."""
    shuffle: bool = False
    """Control experiment: rewards permuted within each rollout, so that they carry no information."""
    overlong_buffer: Count | None = None
    """Tokens before ``rollout.max_response_tokens`` over which DAPO's length penalty grows to ``overlong_penalty``;
    None for none."""
    overlong_penalty: Coefficient = 1.0
    """Penalty of DAPO's length reward for a response of full length."""
    format: FormatConfig = field(default_factory=FormatConfig)
    """Reward for the form of a response."""
    length: LengthConfig = field(default_factory=LengthConfig)
    """Reward for being short."""
    repetition: RepetitionConfig = field(default_factory=RepetitionConfig)
    """Penalty for repetition."""
    language: LanguageConfig = field(default_factory=LanguageConfig)
    """Reward for one language throughout."""
    code: CodeConfig = field(default_factory=CodeConfig)
    """Limits of programs in code rewards."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A language model as verifier."""
