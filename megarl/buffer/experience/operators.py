"""Operators on whole groups before training, and the facts and checks that they read.

``buffer.operators`` names them in their order. An operator is ``operate(members, **settings)``, which returns for each
member None (unchanged), a text (excluded for this reason), or a ``Reward`` (a replacement). It must be a pure function:
every trainer rank calls it, and again for a replayed group. An excluded member is hidden from later operators and left
out of the loss and its group's statistics.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_type_hints

from megarl.config import Config
from megarl.config.bounds import Coefficient, Count, NonNegative, Number, UnitInterval
from megarl.config.load import from_dict, numbers
from megarl.core.errors import ConfigError, DataError, describe
from megarl.core.imports import import_file
from megarl.core.schema import GroupStats, Reward, RewardStatus, Trajectory, Turn
from megarl.rewards.verdict import language_consistency, repetition_penalty
from megarl.tasks import ChatTokenizer


def group_stats(rewards: Sequence[float]) -> GroupStats:
    """Mean and unbiased standard deviation in float64, the same for every order of ``rewards``.

    An all-equal group has std exactly 0 and its reward as mean: a rounding residue divided by std + 1e-6 would become a
    signal. A group of one has std 0.

    Raises:
        ValueError: the group is empty, a reward is not finite, or the variance overflows.
    """
    values = [float(r) for r in rewards]
    if not values:
        raise ValueError("group_stats needs at least one reward, got none")
    if not all(math.isfinite(v) for v in values):
        raise ValueError(f"group_stats needs finite rewards, got {values}")
    if len(set(values)) == 1:
        return GroupStats(mean=values[0], std=0.0, size=len(values))
    try:
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    except OverflowError as error:
        raise ValueError(f"group_stats needs rewards whose variance is finite in float64, got {values}") from error
    return GroupStats(mean=mean, std=math.sqrt(variance), size=len(values))


def is_zero_variance(statuses: Sequence[RewardStatus]) -> bool:
    """Return True if a group's accuracy is 0 or 1; dynamic sampling then replaces the group before training.

    Scores are not compared, because length and format shaping vary them in all-right or all-wrong groups. Missing
    verdicts (error, timeout) count as not right.
    """
    right = sum(status == "ok" for status in statuses)
    return right in (0, len(statuses))


LARGEST_LOGP = 1e-3
"""Largest log-prob that counts as a rounding error above 0."""
LARGEST_SCORE = 1e30
"""Bound of a verdict's score: advantages are float32, at most 3.4e38."""


def check_trajectory(trajectory: Trajectory, vocab_size: int) -> str | None:
    """Return the reason why a trajectory cannot be trained on, or None. Every turn must be whole and follow an earlier
    one; the model must have written at least one, but not the first."""
    turns = trajectory.turns
    if not any(turn.author == "model" for turn in turns):
        return "no turn is the model's"
    for i, turn in enumerate(turns):
        reason = _order_fault(turn, i) or _token_fault(turn, vocab_size)
        if turn.author == "model":
            reason = reason or _logp_fault(turn) or _span_fault(turn)
        elif turn.logp is not None or turn.spans:
            reason = reason or "it has log-probs or versions, which are a model's"
        if reason is not None:
            return f"turn {i} ({turn.author}): {reason}"
    return None


def _order_fault(turn: Turn, i: int) -> str | None:
    if not -1 <= turn.follows < i:
        return f"it follows turn {turn.follows}, which is not an earlier one"
    if turn.author == "model" and turn.follows < 0:
        return "nothing comes before it that could predict its first token"
    return None


def _token_fault(turn: Turn, vocab_size: int) -> str | None:
    if len(turn) == 0:
        return "it has no tokens"
    smallest, largest, *_ = turn.token_bounds
    if smallest < 0 or largest >= vocab_size:
        return f"it has ids {smallest}..{largest}, the vocabulary has {vocab_size}"
    return None


def _logp_fault(turn: Turn) -> str | None:
    logp = turn.logp
    if logp is None or len(logp) != len(turn):
        return f"it has {0 if logp is None else len(logp)} log-probs for {len(turn)} tokens"
    bounds = turn.token_bounds
    if not float(bounds.logp) <= LARGEST_LOGP or math.isinf(float(bounds.logp)):
        return f"{bounds.logp} at token {bounds.at} is not a log-probability"
    return None if turn.finish_reason is not None else "it has no finish reason"


def _span_fault(turn: Turn) -> str | None:
    end, version = 0, None
    for span in turn.spans:
        where = f"span {span.start}..{span.end}"
        if span.start != end or span.end <= span.start:
            return f"{where} does not follow on token {end}"
        if version is not None and span.version < version:
            return f"{where} has weights {span.version}, older than {version} of the span before it"
        end, version = span.end, span.version
    return None if end == len(turn) else f"spans cover {end} of {len(turn)} tokens"


Ruling = str | Reward | None
EndName = Literal["finished", "truncated", "repetition"]
"""Ends caused by the policy; members with other ends have no verdict."""
SETTING = "buffer.operators"
REASON = re.compile(r"[a-z][a-z0-9_]*")
"""Form of a reason, which is part of a metric's name."""


class Member(NamedTuple):
    """A trajectory as operators get it."""

    trajectory: Trajectory
    text: str
    """Last response, without special tokens."""

    @property
    def reward(self) -> Reward:
        """Verdict with the rewards of form; length rewards are added after all operators."""
        return self.trajectory.reward


class Operate(Protocol):
    """Function of an operator; keywords are its settings."""

    def __call__(self, members: Sequence[Member], **settings: Any) -> Sequence[Ruling]: ...


class Operated(NamedTuple):
    kept: list[Trajectory]
    excluded: dict[int, str]
    """Index of a member -> reason."""


def duplicates(members: Sequence[Member], *, strip: bool = True) -> list[Ruling]:
    """Exclude a response whose text an earlier member of the group has, as ``duplicate``.

    Args:
        strip: White space around a text does not count.
    """
    seen: set[str] = set()
    rulings: list[Ruling] = []
    for member in members:
        text = member.text.strip() if strip else member.text
        rulings.append("duplicate" if text in seen else None)
        seen.add(text)
    return rulings


def degenerate(
    members: Sequence[Member],
    *,
    max_repetition: UnitInterval = 0.8,
    ngram: Count = 8,
    language: Literal["en", "zh", "other"] | None = None,
    min_language: UnitInterval = 0.5,
) -> list[Ruling]:
    """Exclude responses that are blank (``empty``), repeat themselves (``repetitive``) or are in another language
    (``language``).

    Args:
        max_repetition: Largest share of repeated n-grams (``reward.repetition``).
        ngram: Words of such an n-gram.
        language: Required language; None allows all.
        min_language: Least share of words in ``language`` (``reward.language``).
    """

    def ruling(text: str) -> str | None:
        if not text.strip():
            return "empty"
        if -repetition_penalty(text, ngram) > max_repetition:
            return "repetitive"
        if language is not None and language_consistency(text, language) < min_language:
            return "language"
        return None

    return [ruling(member.text) for member in members]


def length(
    members: Sequence[Member], *, min_tokens: NonNegative = 0, max_tokens: NonNegative | None = None
) -> list[Ruling]:
    """Exclude trajectories with fewer (``too_short``) or more (``too_long``) sampled tokens."""
    most = math.inf if max_tokens is None else max_tokens

    def ruling(tokens: int) -> str | None:
        return "too_short" if tokens < min_tokens else "too_long" if tokens > most else None

    return [ruling(member.trajectory.response_length) for member in members]


def quality(members: Sequence[Member], *, part: str | None = None, min_score: Number = 0.0) -> list[Ruling]:
    """Exclude members scored below ``min_score`` by a rule or judge, as ``low_quality``.

    Args:
        part: Part of the reward; None is the whole. A member without that part stays.
    """
    scores = [m.reward.score if part is None else m.reward.parts.get(part, math.inf) for m in members]
    return ["low_quality" if score < min_score else None for score in scores]


def variance(members: Sequence[Member], *, min_std: Coefficient = 0.0) -> list[Ruling]:
    """Exclude a whole group, as ``low_variance``, if the unbiased standard deviation of its rewards is at most
    ``min_std``."""
    found = group_stats([member.reward.score for member in members])
    return ["low_variance" if found.std <= min_std else None] * len(members)


def diversity(members: Sequence[Member], *, min_distinct: UnitInterval = 0.5, ngram: Count = 1) -> list[Ruling]:
    """Exclude a whole group, as ``uniform``, if its share of distinct n-grams is below ``min_distinct`` (distinct-n,
    1510.03055 section 4.3). White space separates words."""
    words = [member.text.split() for member in members]
    found = [tuple(own[i : i + ngram]) for own in words for i in range(len(own) - ngram + 1)]
    uniform = bool(found) and len(set(found)) / len(found) < min_distinct
    return ["uniform" if uniform else None] * len(members)


def relabel(
    members: Sequence[Member],
    *,
    status: dict[Literal["ok", "wrong"], float] | None = None,
    end: dict[EndName, float] | None = None,
) -> list[Ruling]:
    """Replace scores according to the trajectory's end, else the verdict's status. Statuses stay.

    Args:
        status: Status -> score.
        end: ``End`` -> score, such as {truncated: -1.0}.
    """
    by_status: Mapping[Any, float] = status or {}
    by_end: Mapping[Any, float] = end or {}

    def ruling(member: Member) -> Reward | None:
        score = by_end.get(member.trajectory.end, by_status.get(member.reward.status))
        return None if score is None else dataclasses.replace(member.reward, score=score)

    return [ruling(member) for member in members]


OPERATORS: dict[str, Callable[..., Sequence[Ruling]]] = {
    "duplicates": duplicates,
    "degenerate": degenerate,
    "length": length,
    "quality": quality,
    "variance": variance,
    "diversity": diversity,
    "relabel": relabel,
}
"""Operators by their name in ``buffer.operators``; other names need ``file``, a Python file with ``operate``."""


class Operators:
    """Operators of ``buffer.operators``, in their order.

    Raises:
        ConfigError: there is no such operator, or it has no such setting.
    """

    def __init__(self, config: Config) -> None:
        self._operators = operators_of(config.buffer.operators)
        self._tokenizer = ChatTokenizer.of(config) if self._operators else None

    def apply(self, group: Sequence[Trajectory]) -> Operated:
        """Apply each operator to the members that earlier operators left.

        Raises:
            DataError: an operator failed, or returned an invalid ruling.
        """
        kept, excluded = list(group), dict[int, str]()
        if self._tokenizer is None or not kept:
            return Operated(kept, excluded)
        texts = {e.index: self._tokenizer.decode(e.response.token_ids) for e in group}
        for name, operate, settings in self._operators:
            members = [Member(e, texts[e.index]) for e in kept]
            try:
                rulings = list(operate(members, **settings))
            except Exception as error:
                raise DataError(f"{SETTING}.{name} failed on group {group[0].group_id}: {describe(error)}") from error
            _check_rulings(name, group[0].group_id, rulings, len(members))
            excluded |= {e.index: r for e, r in zip(kept, rulings, strict=True) if isinstance(r, str)}
            kept = [_ruled(e, r) for e, r in zip(kept, rulings, strict=True) if not isinstance(r, str)]
            if not kept:
                break
        return Operated(kept, excluded)


def operators_of(settings: Mapping[str, Any]) -> list[tuple[str, Operate, dict[str, Any]]]:
    """Return (name, function, settings) of every operator, in order. Raises ConfigError as ``Operators`` does."""
    return [(name, *_operator(name, given)) for name, given in settings.items()]


def _ruled(trajectory: Trajectory, ruling: Ruling) -> Trajectory:
    return dataclasses.replace(trajectory, reward=ruling) if isinstance(ruling, Reward) else trajectory


def _check_rulings(name: str, group_id: str, rulings: Sequence[Any], members: int) -> None:
    where = f"{SETTING}.{name} on group {group_id}"
    if len(rulings) != members:
        raise DataError(f"{where}: {len(rulings)} rulings for {members} members; return one for each, in their order")
    for ruling in rulings:
        if isinstance(ruling, str) and REASON.fullmatch(ruling):
            continue
        if ruling is not None and not (isinstance(ruling, Reward) and abs(ruling.score) <= LARGEST_SCORE):
            raise DataError(
                f"{where} returned {ruling!r}; return None, a reason in small letters, digits and '_', or a Reward "
                f"whose score is a number from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}"
            )


def _operator(name: str, settings: Any) -> tuple[Operate, dict[str, Any]]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{SETTING}.{name}={settings!r} must be its settings, such as {{}} for the usual ones")
    given = dict(settings)
    path = given.pop("file", None)
    if path is None and name not in OPERATORS:
        raise ConfigError(
            f"{SETTING}.{name} does not exist; choose one of {', '.join(OPERATORS)}, or give {SETTING}.{name}.file, a "
            "Python file with def operate(members)"
        )
    if path is None:
        return OPERATORS[name], _checked(name, given)
    operate: Any = getattr(import_file(str(path), f"{SETTING}.{name}.file", "def operate(members)"), "operate", None)
    if not callable(operate):
        raise ConfigError(f"{SETTING}.{name}.file={path} has no def operate(members)")
    try:
        inspect.signature(operate).bind([], **given)
    except TypeError as error:
        known = ", ".join(list(inspect.signature(operate).parameters)[1:])
        raise ConfigError(f"{SETTING}.{name}: {error}; its settings are {known or 'none'}") from error
    return operate, given


def _checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one of ``OPERATORS``, checked against the types and bounds of its function's keywords."""
    keywords = list(inspect.signature(OPERATORS[name]).parameters.values())[1:]
    hints = get_type_hints(OPERATORS[name], include_extras=True)
    kind = dataclasses.make_dataclass(
        name, [(word.name, hints[word.name], dataclasses.field(default=word.default)) for word in keywords]
    )
    found = from_dict(kind, given, f"{SETTING}.{name}.")
    for number in numbers(found, f"{SETTING}.{name}."):
        if number.bound is not None and not number.bound.admits(number.value):
            raise ConfigError(f"{number.name}={number.value:g} must be {number.bound}")
    return vars(found)
