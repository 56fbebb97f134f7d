"""The parts of a job: each row has the condition on the settings, and the class. Hooks are called in this order.

The order matters twice. Colocated engines free their memory before the reward model computes. The reward model scores
trajectories before any part counts them.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.config import Config
from megarl.train.part import Part, Services
from megarl.train.parts.ahead import DrainAhead
from megarl.train.parts.alarms import Alarms
from megarl.train.parts.average import AveragedActor
from megarl.train.parts.batches import KeptBatches
from megarl.train.parts.best_kept import BestKept
from megarl.train.parts.cold import ColdCheck
from megarl.train.parts.colocation import Colocation
from megarl.train.parts.compared_turns import ComparedTurns
from megarl.train.parts.demonstrations import Demonstrations, draws_experts
from megarl.train.parts.equal_episodes import EqualEpisodes
from megarl.train.parts.fixed_reference import FixedReference
from megarl.train.parts.gamed import Gamed
from megarl.train.parts.norm_epsilon import Norms
from megarl.train.parts.prediction import PredictedSeconds
from megarl.train.parts.priority_draws import PriorityDraws
from megarl.train.parts.quiet import Quiet
from megarl.train.parts.reference import ReferenceRefresh
from megarl.train.parts.reports import AccountLine, TruncationLine
from megarl.train.parts.resumed import Resumed
from megarl.train.parts.sampling import SamplingChecks
from megarl.train.parts.scores import RewardModelScores
from megarl.train.parts.speculative import DraftAcceptance
from megarl.train.parts.stored_groups import StoredGroups
from megarl.train.parts.taught_tokens import TaughtTokens, teaches_a_part
from megarl.train.parts.teachers import Teachers
from megarl.train.parts.verdicts import Verdicts
from megarl.train.rollout.group_part import made

PARTS: tuple[tuple[Callable[[Config], bool], type[Part]], ...] = (
    (lambda c: c.sync.order == "completion" and c.sync.pause == "wait", Quiet),
    (lambda c: c.rollout.speculative != "none", DraftAcceptance),  # before colocated engines leave
    (lambda c: c.rollout.is_colocated, Colocation),
    (lambda c: c.reference.refresh != "never", ReferenceRefresh),
    (lambda c: c.reference.refresh == "never" and c.algorithm.kl.coef > 0, FixedReference),
    (lambda c: c.sync.cold_interval is not None, ColdCheck),
    (lambda c: c.reward_model.path is not None, RewardModelScores),
    (lambda c: bool(c.teachers), Teachers),
    (draws_experts, Demonstrations),
    (teaches_a_part, TaughtTokens),
    (lambda c: c.trainer.keep_batches, KeptBatches),
    (lambda c: c.evaluation.average is not None, AveragedActor),
    (lambda c: not c.rollout.is_colocated and c.sync.max_staleness > 0, DrainAhead),
    (lambda c: c.trainer.keep_best is not None, BestKept),
    (lambda c: c.alarms.groups and c.taskset.order == "prioritized", PriorityDraws),
    (lambda c: c.alarms.trajectories > 0 and c.rollout.workflow == "environment", EqualEpisodes),
    (lambda c: True, TruncationLine),
    (lambda c: True, AccountLine),
    (lambda c: True, PredictedSeconds),
    (lambda c: True, SamplingChecks),
    (lambda c: True, Resumed),
    (lambda c: True, Norms),
    (lambda c: c.alarms.groups, StoredGroups),
    (lambda c: c.alarms.verdicts > 0 and not c.reward.shuffle and not c.buffer.operators, Verdicts),
    (lambda c: c.alarms.trajectories > 0, ComparedTurns),
    (lambda c: (c.alarms.truth is not None or c.alarms.other_truth) and not c.reward.shuffle, Gamed),
    (lambda c: True, Alarms),
)


def parts_of(services: Services) -> list[Part]:
    """Make the parts that the settings select, each with the services that its constructor names."""
    return [made(part, services) for wanted, part in PARTS if wanted(services.config)]
