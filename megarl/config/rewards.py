"""Settings of rewards: verifiers and their processes, the sandbox, the judge, and rewards for form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megarl.config.bounds import Bound, Coefficient, Count, NonNegative, RewardWeight, Seconds, Temperature


@dataclass(frozen=True)
class CodeConfig:
    """Programs, run in a sandbox (docs/sandbox.md)."""

    url: str | None = None
    """URL of a ``megarl sandbox serve``, with its key in MEGARL_SANDBOX_KEY; None uses this machine's sandbox."""
    python: str | None = None
    """Python interpreter of programs, with its packages; None takes megarl's, or /usr/bin/python3 if megarl's is not
    world-readable."""
    score: Literal["all", "fraction"] = "all"
    """Score of an answer: ``all`` gives 1 if every test passes and stops with 0 at the first failure; ``fraction`` runs
    all tests and gives the share that passes."""
    cpu_s: Annotated[int, Bound(1, 3600)] = 4
    """Processor seconds of one test; assertions share one process and this limit times their number."""
    wall_s: Annotated[float, Bound(0, 3600, above=True)] = 6.0
    """Wall-clock seconds of one test, of each assertion, and of the program's import before them."""
    item_s: Annotated[float, Bound(0, 3600, above=True)] = 8.0
    """Seconds for all tests of an answer. Must be below ``reward.timeout_s``, so that a slow program gets a verdict
    before its worker is killed."""
    memory_mib: Annotated[int, Bound(16, 2**20)] = 1024
    """MiB of memory of one test, or of all assertions of an answer together."""


JUDGE_IS_ROLLOUT = "rollout"
"""``reward.judge.url`` of the job's own engines."""


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that judges responses, at any OpenAI-compatible server (docs/judge.md)."""

    url: str | None = None
    """Base URL of the server (http://HOST:PORT/v1), with its key in MEGARL_JUDGE_KEY; ``rollout`` is the job's
    engines."""
    model: str | None = None
    """Name of the judge's model at the server; None takes the first that the server lists."""
    rubric: str | None = None
    """Text file with {question}, {answer} and optionally {reference}; None takes megarl's rubric."""
    votes: Annotated[int, Bound(1, 101)] = 1
    """Judgements of a response, each with a different seed. The majority decides; a tie is wrong. Above 1 it needs a
    temperature."""
    temperature: Temperature = 0.0
    """Temperature of the judge; 0 is greedy."""
    max_tokens: Count = 1024
    """Most tokens of a judgement."""
    concurrency: Annotated[int, Bound(1, 4096)] = 32
    """Most requests in flight."""
    timeout_s: Seconds = 120.0
    """Timeout in seconds of one request to the judge."""
    retries: Annotated[int, Bound(0, 100)] = 3
    """Retries of a failed request."""
    cache: str | None = None
    """SQLite file that caches judgements (configs/train.yaml: in the run's directory); None keeps no cache."""


@dataclass(frozen=True)
class FormatConfig:
    """1 for a response in the required form, else 0 (DeepSeek-R1, 2501.12948 §2.2.2)."""

    weight: RewardWeight = 0.0
    """Weight of the format reward in the score; 0 leaves it out."""
    form: Literal["think", "think_answer"] = "think_answer"
    """Required form: <think>…</think> then text, or then <answer>…</answer>; each tag once, in order, no text
    outside."""


@dataclass(frozen=True)
class LengthConfig:
    """k1.5's length reward among the responses of a group (2501.12599 §2.3.3)."""

    weight: RewardWeight = 0.0
    """Weight of the length reward in the score; 0 leaves it out."""
    warmup_steps: NonNegative = 0
    """Steps at the start without the length reward."""


@dataclass(frozen=True)
class RepetitionConfig:
    """The share of a response's n-grams of words that occur earlier in it, as a number from -1 to 0 (Open-R1)."""

    weight: RewardWeight = 0.0
    """Weight of the repetition reward in the score; 0 leaves it out."""
    ngram: Annotated[int, Bound(1, 100)] = 4
    """Words of an n-gram in the repetition reward."""


@dataclass(frozen=True)
class LanguageConfig:
    """The share of a response's words in one language (DeepSeek-R1, 2501.12948 §2.3.2)."""

    weight: RewardWeight = 0.0
    """Weight of the language reward in the score; 0 leaves it out."""
    language: Literal["prompt", "en", "zh"] = "prompt"
    """Language that responses should have; ``prompt`` takes the question's language."""


@dataclass(frozen=True)
class RewardConfig:
    path: str | None = None
    """A Python file with verl's ``compute_score``; None uses ``megarl.rewards.compute_score``."""
    routes: dict[str, str] = field(default_factory=dict)
    """Prefix of ``data_source`` -> family of verifiers, or family/subtype; consulted before megarl's own routes
    (``megarl.rewards.routes``), e.g. {my_set: math, my_images: vision/count}."""
    weight: RewardWeight = 1.0
    """Weight of the verifier's score in the sum of all parts."""
    workers: Annotated[int, Bound(1, 1024)] = 1
    """Verifier processes on the explorer's node."""
    hosts: list[str] = field(default_factory=list)
    """Further reward workers as HOST:PORT*N: N workers of a ``megarl rewards serve`` on another node."""
    timeout_s: Seconds = 10.0
    """Timeout in seconds of one response's verdict; after it the worker is killed."""
    retries: Annotated[int, Bound(0, 100)] = 1
    """Retries of a response without a verdict (error, timeout). The death of its worker is not counted."""
    max_kills: Annotated[int, Bound(1, 100)] = 3
    """Give up on a response after this many dead or hung workers; the same text is then always an error."""
    backlog: Count = 8192
    """Most responses that wait for their score; above it no further group is started."""
    on_error: Literal["drop", "zero", "mask"] = "drop"
    """Treatment of a response without a verdict: drop its group from training; score it 0 (only for errors and timeouts
    of the verifier); or exclude it from the loss and its group's statistics. Always reported."""
    late_steps: NonNegative | None = None
    """Steps after which a requested group that still awaits rewards (data sources of the family ``late``) is left out;
    null waits for them (docs/rewards.md)."""
    shuffle: bool = False
    """Control experiment: permute rewards within each rollout, so that they carry no information."""
    overlong_buffer: Count | None = None
    """Tokens before ``rollout.max_response_tokens`` over which DAPO's length penalty grows to ``overlong_penalty``;
    None for none."""
    overlong_penalty: Coefficient = 1.0
    """DAPO's length penalty of a response of full length."""
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
