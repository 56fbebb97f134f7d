"""The services of a job that samples, made once for its step and its parts."""

from __future__ import annotations

import os

from megarl.engines.client.names import KEY_VARIABLE
from megarl.learn import algorithms
from megarl.train.loop.rank import TrainerRank
from megarl.train.loop.rollout_waiting import ReplacedEngines, RolloutWaiter, WrittenCheckpoints
from megarl.train.part import Services
from megarl.train.rollout.evaluation import Evaluates, Evaluation, EvaluationMeanwhile
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts
from megarl.train.sync.connection import EngineConnection
from megarl.train.sync.files import FilePublisher
from megarl.train.sync.last_published import outlives_update
from megarl.train.sync.look import EngineLook
from megarl.train.sync.publish import WeightPublisher
from megarl.train.sync.weights import WeightSync


def services_of(rank: TrainerRank) -> Services:
    """Make the services for a rank's models. No engine is joined yet."""
    config = rank.config
    place = (rank.context, rank.store, rank.ranks, rank.reporter)
    layout = (config, rank.models.actor.model.layout, rank.models.hf_config, rank.context.rank)
    together = config.rollout.is_colocated
    links: WeightPublisher | None = None
    if config.sync.method == "direct":
        look = EngineLook(
            rank.store,
            os.environ.get(KEY_VARIABLE, ""),
            own=algorithms.job_of(config).is_alone,
            together=together,
            begun=lambda: weights.version.n > 0,
            silence_s=config.cluster.heartbeat_s,
        )
        connection = EngineConnection(*layout, look=look, stopping=lambda: rank.ranks.stopping)
        links = WeightPublisher(connection, rank.store.engines)
    weights = WeightSync(
        rank.context,
        rank.ranks,
        rank.reporter,
        rank.models,
        links or FilePublisher(*layout),
        rank.memory,
        rank.store.pacing.record_version,
        links=links,
        keeps_sent=outlives_update(config.sync) and not together,
    )
    repairs = (WrittenCheckpoints(rank.checkpoints), ReplacedEngines(weights, rank.ranks))
    wait = RolloutWaiter(*place, repairs).wait
    reader = RolloutReader(
        NodeReader(rank.timeout_s + config.store.outage_s),
        rank.store,
        lambda: rank.ranks.stopping,
        whole=bool(config.buffer.operators),
    )
    rank.learner.with_arrays = reader.with_arrays
    in_front = Evaluation(rank.context, rank.store, rank.reporter, wait)
    evaluation: Evaluates = in_front
    if config.trainer.eval_engines:
        evaluation = EvaluationMeanwhile(*place, in_front, wait)
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
        links=links,
        weights=weights,
        rollouts=Rollouts(
            rank.context, rank.algorithm, rank.store, rank.reporter, reader, wait, rank.models.head.vocab_size
        ),
        evaluation=evaluation,
        wait=wait,
        newest=rank.checkpoints.newest,
        export=rank.export,
    )
