"""The services of a job that samples, made once for its step and its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megarl.core.config import Config
from megarl.engine.client.auth import KEY_VARIABLE
from megarl.explore.store import Store
from megarl.learn import algorithms
from megarl.train.loop.rank import TrainerRank
from megarl.train.loop.waiting import ReplacedEngines, RolloutWaiter, WrittenCheckpoints
from megarl.train.part import Services
from megarl.train.rollout.evaluation import Evaluates, Evaluation
from megarl.train.rollout.meanwhile import EvaluationMeanwhile
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.files import FilePublisher
from megarl.train.sync.others import EnginesOfOthers
from megarl.train.sync.own import OwnEngines
from megarl.train.sync.publish import WeightPublisher
from megarl.train.sync.weights import WeightSync


class JobEngines:
    """Finds the engines that take weights: the job's own, or those of explore programs. For rank 0.

    Args:
        begun: True once weights were published.
    """

    def __init__(self, config: Config, store: Store, begun: Callable[[], bool]) -> None:
        key, self.alone, self._begun = os.environ.get(KEY_VARIABLE, ""), algorithms.job_of(config).is_alone, begun
        self._own = OwnEngines(store, key, together=config.rollout.is_colocated)
        self._others = EnginesOfOthers(store, key, config.cluster.heartbeat_s)

    def urls(self) -> Sequence[str] | None:
        """URLs of the engines; None where all are absent by order."""
        return self._own.urls(begun=self._begun()) if self.alone else self._others.urls()

    def registered(self) -> list[str]:
        """``OwnEngines.registered``; none of explore programs."""
        return self._own.registered() if self.alone else []


def services_of(rank: TrainerRank) -> Services:
    """Make the services beside a rank's models. No engine is joined yet."""
    config = rank.config
    place = (rank.context, rank.store, rank.ranks, rank.reporter)
    engines = JobEngines(config, rank.store, lambda: weights.version.n > 0)
    layout = (config, rank.models.actor.model.layout, rank.models.hf_config, rank.context.rank)
    publisher: WeightPublisher | FilePublisher
    if config.sync.method == "checkpoint":
        publisher = FilePublisher(*layout)
    else:
        connection = EngineConnection(
            *layout,
            engines=engines.urls,
            registered=engines.registered,
            come_and_go=not engines.alone,
            stopping=lambda: rank.ranks.stopping,
        )
        publisher = WeightPublisher(connection)
    weights = WeightSync(
        rank.context, rank.ranks, rank.reporter, rank.models, publisher, rank.memory, rank.store.pacing.record_version
    )
    repairs = (WrittenCheckpoints(rank.checkpoints), ReplacedEngines(weights, rank.ranks))
    wait = RolloutWaiter(*place, repairs).wait
    reader = RolloutReader(NodeReader(rank.timeout_s + config.store.outage_s), rank.store, lambda: rank.ranks.stopping)
    in_front = Evaluation(rank.context, rank.store, rank.reporter, wait)
    evaluation: Evaluates = in_front
    if config.trainer.eval_engines:
        assert isinstance(publisher, WeightPublisher), "files are for engines of other programs"
        evaluation = EvaluationMeanwhile(*place, in_front, publisher.kept, wait, engines.registered)
    return Services(
        config=config,
        algorithm=rank.algorithm,
        context=rank.context,
        store=rank.store,
        ranks=rank.ranks,
        reporter=rank.reporter,
        models=rank.models,
        memory=rank.memory,
        reader=reader,
        publisher=publisher,
        weights=weights,
        rollouts=Rollouts(
            rank.context, rank.algorithm, rank.store, rank.reporter, reader, wait, rank.models.head.vocab_size
        ),
        evaluation=evaluation,
        wait=wait,
        newest=rank.checkpoints.newest,
        export=rank.export,
    )
