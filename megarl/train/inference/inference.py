"""Inference of a step: forward passes of every model over the step's tokens; scores of given rows by teachers.

Shape legend: N sequences of a step, T their positions (``batching.Sequences``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megarl import ops
from megarl.config import Config
from megarl.config.algorithms import reads_distribution, teacher_top_k
from megarl.config.lora import LoraConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import TeacherScores, Trajectory, name_of
from megarl.learn.algorithms import Algorithm
from megarl.learn.algorithms.terms.reduction import repeated
from megarl.learn.batching import Sequences, StepShare, dealt, of_demonstrations, score_positions
from megarl.learn.batching.images import Images
from megarl.learn.memory.phases import Phase
from megarl.learn.models.teaching import LikeliestTokens, TeacherHead
from megarl.learn.parallel import process_groups
from megarl.learn.training.model import Model, WithoutAdapters, micro_batching_for
from megarl.learn.training.schedule import Head
from megarl.tasks.teacher_scores import Pair, Score, Scored
from megarl.train.batch.batch import StepBatch, StepPlan, each_once, overlong
from megarl.train.batch.images import StepImages
from megarl.train.batch.samples import WithArrays
from megarl.train.inference.distributions import Distributions, scored_at_urls, teacher_heads
from megarl.train.inference.models import Models, load_teacher
from megarl.train.ranks import on_all_ranks
from megarl.weights.checkpoint.formats.hf_source import score_pad

_PHASES = {"old_logp": Phase.OLD_LOGP, "ref_logp": Phase.REF_LOGP, "values": Phase.VALUES}
"""Field of ``Sequences`` -> phase of inference that fills it."""


class Inference:
    """Fills the fields of a step's batch that an algorithm needs. Every rank makes the same calls.

    Args:
        enter: ``PhaseMemory.enter``, which loads what a phase needs onto the device.
    """

    def __init__(self, config: Config, algorithm: Algorithm, models: Models, enter: Callable[[Phase], None]) -> None:
        self._config, self._algorithm = config, algorithm
        self.models, self.enter = models, enter
        self._heads: list[TeacherHead] | None = None

    @property
    def first_update_infers(self) -> bool:
        """True if the first update's own forward pass provides ``old_logp`` of its tokens. Requirements: nothing needs
        them earlier (``estimate`` may), and the critic's warm-up skips no update. Each token passes through the model
        once (a response may be in several pairs). Updates compute the same as inference (adapters' dropout differs).
        Offline jobs fill nothing in updates."""
        algorithm, settings = self._algorithm, self._config.algorithm
        others = algorithm.estimate is not None or self.models.critic is not None
        once = algorithm.choose_pairs is None and not algorithm.offline
        lora = self._config.model.lora
        alike = not (lora.is_used and lora.dropout)
        return "old_logp" in algorithm.needs and once and alike and not others and settings.kl.target is None

    def fill(self, batch: StepBatch) -> None:
        """Fill the fields that the algorithm needs: log-probs of the update's starting weights and of the reference,
        values. ``Learner.train_step`` may fill ``old_logp`` of the first update.

        Raises NonRetryableError, on every rank, for expert ids that do not fit the actor.
        """
        sequences = batch.sequences
        if self._config.rollout.routing_replay:
            on_all_ranks(lambda: self.models.check_routing(sequences, batch.rows))
        truncated = set(overlong(batch.rows, self._config.algorithm))
        for name, model, lists in self._inferred(batch.updates, batch.outside, truncated):
            self.enter(_PHASES[name])
            outputs = model.outputs(sequences, [model.micro_batches(sequences, units) for units in lists])
            setattr(sequences, name, outputs)
        if "teacher_logp" in self._algorithm.needs:
            self._ask_teachers(batch)

    def _ask_teachers(self, batch: StepBatch) -> None:
        """Fill the fields of the teachers: log-probs by the teacher of each held sequence, and what a divergence from
        its distributions reads; 0 elsewhere."""
        sequences, settings = batch.sequences, self._config.algorithm
        found = self._stored_logp(batch)
        distributions = None
        if reads_distribution(settings):
            if self._heads is None:
                self._heads = on_all_ranks(lambda: teacher_heads(self.models, settings.top_k))
            distributions = Distributions(self.models, self._heads, settings.top_k, sequences)
        taught = list(self._taught(batch.updates, batch.teachers))
        if taught:
            self.enter(Phase.TEACHERS)
        for name, model, units in taught:
            on_all_ranks(lambda name=name, model=model: check_ids(sequences, self._config, name, model))  # type: ignore[misc]
            batches = [model.micro_batches(sequences, units)]
            # Every sequence has one teacher at most, so the sum is exact.
            if distributions is None:
                found += model.outputs(sequences, batches)
            else:
                columns, more = distributions.of(name)
                found += model.outputs(sequences, batches, columns=columns, more=more)
        sequences.teacher_logp = found
        if distributions is not None:
            batch.distributions = distributions.result(batch)

    def _stored_logp(self, batch: StepBatch) -> torch.Tensor:
        """Return float32 [T]: log-probs that teachers at URLs have given to the explorer, 0 for other sequences."""
        sequences, scored = batch.sequences, scored_at_urls(batch, self._config.teachers)
        if not scored.any():
            return torch.zeros(len(sequences.tokens))
        assert sequences.teacher_logp is not None, "TaughtGroups drops groups without the scores of a teacher"
        return sequences.teacher_logp * repeated(scored, sequences.lengths)

    def _taught(
        self, updates: list[list[list[int]]], teachers: Sequence[str | None]
    ) -> Iterator[tuple[str, Model, list[list[int]]]]:
        """Yield (name, model, units) of each teacher that has sequences in the step."""
        if "teacher_logp" not in self._algorithm.needs:
            return
        numbers = sorted({number for units in updates for unit in units for number in unit})
        for name, model in self.models.teachers.items():
            if units := [[number] for number in numbers if teachers[number] == name]:
                yield name, model, units

    def _inferred(
        self, updates: list[list[list[int]]], outside: list[list[int]], truncated: set[int]
    ) -> Iterator[tuple[str, Model | WithoutAdapters, list[list[list[int]]]]]:
        """Yield (field of ``Sequences``, model that fills it, lists of units to process), in order. Arguments as in
        ``StepPlan``."""
        # The mismatch uses log-probs of every response, the adaptive KL those that ``filter_overlong`` keeps.
        rest = outside if "old_logp" in self._algorithm.needs else []
        kept = [unit for unit in rest if not truncated.intersection(unit)]

        def lists(others: list[list[int]], first: int = 0) -> list[list[list[int]]]:
            return each_once([*updates[first:], *([others] if others else [])])

        models = self.models
        if "old_logp" in self._algorithm.needs:
            yield "old_logp", models.actor.model, lists(rest, int(self.first_update_infers))
        if models.reference is not None:
            yield "ref_logp", models.reference, lists(kept)
        if models.critic is not None:
            yield "values", models.critic.model, lists(kept)

    def share(self, plan: StepPlan) -> StepShare | None:
        """Choose the sequences of a step that this rank holds, which its models process in inference and updates; None
        for all. Every rank calls it."""
        if self._algorithm.whole_step:
            return None
        inferred = self._inferred(plan.updates, plan.outside, plan.overlong)
        taken: list[tuple[Model | WithoutAdapters, list[list[int]]]] = [
            (m, units) for _, m, lists in inferred for units in lists
        ]
        taken += [(model, units) for _, model, units in self._taught(plan.updates, plan.teachers)]
        for trained in (self.models.actor, self.models.critic):
            if trained is not None:
                taken += [(trained.model, units) for units in plan.updates]
        return share_of(plan.lengths, plan.patches, taken)


def check_ids(sequences: Sequences, config: Config, name: str, teacher: Model) -> None:
    """Check that a teacher has an embedding for every token of the sequences. Raises NonRetryableError.

    Before the start it was compared with the actor's tokenizer, and the actor's vocabulary may be larger than that.
    """
    assert teacher.head is not None, "a teacher is a language model"
    largest, size = int(sequences.tokens.max()) if len(sequences.tokens) else 0, teacher.head.vocab_size
    if largest >= size:
        raise NonRetryableError(
            f"the actor has sampled token {largest}, which its tokenizer does not have, and "
            f"teachers.{name}.path={config.teachers[name].path} has vocab_size={size}; take a teacher whose vocab_size "
            "is the actor's, or warm the actor up so that it does not sample such tokens"
        )


def model_scores(
    model: Model, trajectories: list[Trajectory], images: StepImages | None = None, with_arrays: WithArrays = list
) -> list[float]:
    """Return the reward model's score of each trajectory, read after the last model turn. Every rank calls it.

    Args:
        images: Images of the step; None for a text model.
        with_arrays: Reads the arrays of the trajectories that this rank scores.

    Raises DataError, on every rank, if a trajectory's placeholders do not fit its images.
    """
    lengths = torch.tensor([sum(map(len, trajectory.answered())) for trajectory in trajectories])
    patches = None
    if images is not None:
        patches = [images.patches(d for at in t.answered_images for d in at.digests) for t in trajectories]
    share = share_of(lengths, patches, [(model, None)])
    held = with_arrays(trajectories if share is None else [trajectories[i] for i in share.numbers.tolist()])
    sequences = of_demonstrations([trajectory.answered() for trajectory in held])
    sequences.share = share
    if images is not None:
        shown = [trajectory.answered_images for trajectory in held]
        on_all_ranks(lambda: images.put(sequences, shown, lambda i: name_of(held[i])))
    if sequences.images is None and any(patches or ()):
        sequences.images = Images.of_text(sequences.lengths)
    outputs = model.outputs(sequences, [model.micro_batches(sequences)])
    found: list[float] = sequences.together(outputs[score_positions(sequences, score_pad(model.hf_config))]).tolist()
    return found


Taken = Sequence[tuple[Model | WithoutAdapters, Sequence[Sequence[int]] | None]]
"""(model, units of sequences that it processes in one pass; None for all) pairs."""


def share_of(lengths: torch.Tensor, patches: Sequence[int] | None, taken: Taken) -> StepShare | None:
    """Make this rank's share of a step, the union of its models' sequences; None if a model has no data-parallel ranks,
    so that all ranks hold the whole step.

    Every rank calls it.

    Args:
        lengths: int64 [N] of all sequences of the step.
        patches: [N], image patches; None for a text model.

    Raises ValueError if a sequence is longer than a micro-batch.
    """
    if min((model.micro_batching.dp for model, _ in taken), default=1) == 1:
        return None
    each, numbers = lengths.tolist(), set[int]()
    for model, units in taken:
        for batch in dealt(each, model.micro_batching, units, patches)[model.dp_rank]:
            numbers.update(batch)
    return StepShare.of(numbers, lengths, patches)


@contextmanager
def path_teachers(config: Config, vocab_size: int, port: int) -> Iterator[Score]:
    """Yield a function that scores rows at temperature 1. It builds each teacher at its first use.

    Args:
        vocab_size: Number of the student's ids.
        port: Free port of the loopback address, for torch's rendezvous.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if config.parallel.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the supervisor does
    torch.set_num_threads(config.trainer.num_threads)
    ops.use(config.trainer.kernels)
    process_groups.initialize(config.parallel, seed=config.trainer.seed)
    built: dict[str, Model] = {}

    def score(name: str, pairs: Sequence[Pair]) -> list[Scored]:
        if name not in built:
            built[name] = _teacher(config, name, vocab_size)
        return _scored(config, name, built[name], vocab_size, pairs)

    try:
        yield score
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _teacher(config: Config, name: str, vocab_size: int) -> Model:
    model, teacher = config.model, config.teachers[name]
    head = Head(vocab_size, 1.0, config.trainer.logits_bytes, model.head_dtype == "float32")
    settings = replace(model, dtype=teacher.dtype or model.dtype, lora=LoraConfig())
    micro_batching = micro_batching_for(config.parallel, config.trainer)
    return load_teacher(Path(str(teacher.path)), settings, config.parallel, head, micro_batching)


def _scored(config: Config, name: str, model: Model, vocab_size: int, pairs: Sequence[Pair]) -> list[Scored]:
    """Return the scores of responses. Raises NonRetryableError for a token without an embedding."""
    assert model.head is not None, "a teacher is a language model"
    sequences, top_k = of_demonstrations(pairs), teacher_top_k(config.algorithm)
    check_ids(sequences, config, name, model)
    both, found = min(vocab_size, model.head.vocab_size), torch.zeros(len(sequences.tokens), 2 * top_k)
    columns = LikeliestTokens(top_k, both) if top_k else None
    batches = [model.micro_batches(sequences)]
    logp = model.outputs(sequences, batches, columns=columns, more=found if top_k else None)
    lengths, kept = [len(response) for _, response in pairs], sequences.mask
    return [
        Scored(TeacherScores(name, own.numpy(), top[:, :top_k].int().numpy(), top[:, top_k:].numpy()), both)
        for own, top in zip(logp[kept].split(lengths), found[kept].split(lengths), strict=True)
    ]
