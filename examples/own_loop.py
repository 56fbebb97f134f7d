"""A training loop of your own: ``megarl train experiment=quickstart trainer.loop=examples/own_loop.py``.

It uses the services of megarl's own loop (``megarl/train/step.py``) and gives the same weights, to the bit. Change what
lies between two calls: another order, another batch, a metric, a second update. Every trainer rank runs the file.
"""

from megarl.learn.memory.phases import Phase
from megarl.train.batch.samples import trajectory_metrics
from megarl.train.loop.course import Course
from megarl.train.loop.rank import TrainerRank
from megarl.train.ranks import Stopped, TrainState
from megarl.train.rollout.group_part import Published
from megarl.train.services import Services, services_of
from megarl.train.step import OnlineSteps


def run(rank: TrainerRank) -> None:
    """Train from the newest checkpoint to the last step, or until the job is asked to stop."""
    course = Course(rank, OnlineSteps(rank))
    state = course.start()  # the models, after a resume and the warm start
    if state is None:
        return
    services, finished = services_of(rank), False
    rank.memory.enter(Phase.SYNC)
    try:
        services.weights.connect()
        while not (finished := state.step == rank.config.trainer.steps):
            state = step(rank, services, state)
        services.weights.publish(state.step)
        services.evaluation.run(state, services.weights.version, "eval-after")
    except Stopped:
        finished = False
    course.end(state, finished)


def step(rank: TrainerRank, services: Services, state: TrainState) -> TrainState:
    """Make one step: weights to the engines, an evaluation where it is due, answers back, an update."""
    weights, interval = services.weights, rank.config.trainer.eval_interval
    rank.timeline.reset()
    with rank.timeline.phase("step", step=state.step):
        metrics = weights.publish(state.step)  # proven equal in every engine, or an error
        if not state.step or (interval and state.step % interval == 0):
            services.evaluation.run(state, weights.version, f"eval-{state.step}" if state.step else "eval-before")
        if rank.context.rank == 0:
            rank.store.pacing.record_live(weights.version)  # explorers may sample with them
        published = Published(weights.version, weights.step)
        groups = services.rollouts.groups(state, published)  # waits; raises Stopped
        batch = rank.learner.batch_of(groups.trajectories, lags=groups.lags)
        rank.inference.fill(batch)  # log-probs of the actor, of the reference, values
        after, trained = rank.learner.train_step(state, batch)
        metrics |= trajectory_metrics(batch.outcomes, groups.report) | groups.metrics | trained
        after = rank.end_step(after, metrics, weights.version, groups.used)  # a checkpoint where one is due
    tokens = int(batch.sequences.step_lengths.sum())
    rank.reporter.record_step(after.step, metrics, tokens=tokens, used=groups.used)
    return after
