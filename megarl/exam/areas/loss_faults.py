"""Faults of losses, advantages, gradients and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any

import torch

from megarl.exam.fault import Fault, wrap

if TYPE_CHECKING:
    from megarl.config.algorithms import AlgorithmConfig
    from megarl.core.schema import GroupStats
    from megarl.learn.algorithms import Loss
    from megarl.learn.training.objectives import LossTokens, Objective

UPDATES = 2
"""Updates of a step of the small jobs."""


def _objective(change: Callable[[Objective], Objective]) -> None:
    """Change the actor's objective of every update."""
    from megarl.learn.training import objectives

    wrap(objectives.policy, lambda original, *args, **named: change(original(*args, **named)))


def _scaled(objective: Objective, factor: float) -> Objective:
    def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
        found = objective.loss(kept, outputs)
        return found._replace(total=found.total * factor)

    return replaced(objective, loss=loss)


def _policy_loss(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change keywords of the policy loss: ``change(keywords)`` returns those to replace."""
    from megarl.ops import policy

    wrap(policy.policy_loss, lambda original, *args, **named: original(*args, **{**named, **change(named)}))


def _mean_of_each_micro_batch() -> None:
    def change(objective: Objective) -> Objective:
        def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
            found = objective.loss(kept, outputs)
            return found._replace(total=found.total / objective.count(kept).clamp(min=1).to(found.total))

        return replaced(objective, loss=loss, count=lambda kept: torch.ones(()))

    _objective(change)


def _mean_of_each_response() -> None:
    from megarl.learn.training import objectives

    def around(original: Any, algorithm: Any, settings: Any, *args: Any, **named: Any) -> Any:
        return original(algorithm, replaced(settings, aggregation="seq_mean_token_mean"), *args, **named)

    wrap(objectives.policy, around)


def _denominator_of_each_rank() -> None:
    from megarl.learn.training import model

    class Local:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

        def all_reduce(self, count: torch.Tensor, group: Any) -> None:
            count *= torch.distributed.get_world_size(group)

    module: Any = model
    module.dist = Local()


def _loss_divided_by_ranks() -> None:
    from megatron.core import parallel_state

    _objective(lambda objective: _scaled(objective, 1.0 / parallel_state.get_data_parallel_world_size()))


def _loss_divided_by_micro_batches() -> None:
    from megarl.learn.training.model import TrainedModel

    def around(original: Any, self: Any, sequences: Any, batches: Any, objective: Any, logp: Any) -> Any:
        return original(self, sequences, batches, _scaled(objective, 1.0 / len(batches)), logp)

    wrap(TrainedModel._backward, around)


def _truncated_in_denominator(each: bool = False) -> None:
    from megarl.train.batch import batch

    factor = [1.0]

    def filtered(original: Any, batch: Any, settings: Any) -> None:
        before = batch.sequences.mask.clone()
        original(batch, settings)
        kept = batch.sequences.mask
        lost = [not part.any() for part in kept.split(batch.sequences.lengths.tolist())]
        extra = sum(lost) if each else int(before.sum() - kept.sum())
        factor[0] = 1.0 + extra / max(1, int(kept.sum()))

    wrap(batch.filter_overlong, filtered)
    _objective(lambda objective: replaced(objective, count=lambda kept: objective.count(kept) * factor[0]))


def _masked_sample_counts_one() -> None:
    _truncated_in_denominator(each=True)


def _kl_sign() -> None:
    _policy_loss(lambda named: {"kl_coef": -named["kl_coef"]})


def _kl_without_reference() -> None:
    _policy_loss(lambda named: {"kl": named["kl"] and "k1"})


def _kl_only_logged() -> None:
    _policy_loss(lambda named: {"kl_coef": 0.0})


def _kl_twice() -> None:
    _policy_loss(lambda named: {"kl_coef": 2.0 * named["kl_coef"]})


def _reference_temperature() -> None:
    from megarl.learn.training.model import Model

    def around(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        alone = {"temperature": 1.0} if self.optimizer is None and self.head is not None else {}
        return original(self, *args, **{**named, **alone})

    wrap(Model.outputs, around)


def _reference_shares_embedding() -> None:
    from megarl.learn.models.gpt import unwrap
    from megarl.train.inference.models import Models

    def around(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        stages: list[Any] = [unwrap(model.chunks[0]) for model in (self.reference, self.actor.model)]
        own, other = (stage.embedding.word_embeddings for stage in stages)
        own.weight.data = other.weight.data

    wrap(Models.build, around)


def _reference_follows_actor() -> None:
    from megarl.train.inference.inference import Inference

    def around(original: Any, self: Any, batch: Any) -> None:
        self.models.refresh_reference()
        original(self, batch)

    wrap(Inference.fill, around)


def _old_logp_recomputed() -> None:
    from megarl.learn.training import objectives

    wrap(objectives.policy, lambda original, *args, **named: original(*args, **{**named, "unchanged": True}))


def _ratio_at_another_temperature() -> None:
    from megarl.train.inference.models import Models

    def around(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.head = replaced(self.head, temperature=1.0)

    wrap(Models.__init__, around)


def _clip_left_out() -> None:
    _policy_loss(lambda named: {"clip_low": math.inf, "clip_high": math.inf})


def _clip_before_advantage() -> None:
    from megarl.ops import policy

    def around(original: Any, logp: Any, old_logp: Any, advantages: Any, *args: Any, **named: Any) -> Any:
        # |A|·max(−r, −clip(r)) = −|A|·min(r, clip(r)): the sign of A comes after the minimum
        weight = named["is_weight"]
        signs = advantages.sign() if weight is None else advantages.sign() * weight
        return original(logp, old_logp, advantages.abs(), *args, **{**named, "is_weight": signs})

    wrap(policy.policy_loss, around)


def _clip_range_from_epsilon() -> None:
    _policy_loss(lambda named: {"clip_low": 1.0 - named["clip_low"]})


def _entropy_only_logged() -> None:
    _policy_loss(lambda named: {"entropy_coef": 0.0})


def _entropy_sign() -> None:
    _policy_loss(lambda named: {"entropy_coef": -named["entropy_coef"]})


def _advantages(change: Callable[[list[float], AlgorithmConfig], list[GroupStats]]) -> None:
    """Change the statistics of groups: ``change(rewards, settings)`` returns those of each response."""
    from megarl.learn.algorithms import Algorithm

    def around(original: Any, self: Any, rewards: Any, tokens: Any, config: Any) -> Any:
        own = [reward for reward, _ in rewards]
        return original(self, list(zip(own, change(own, config), strict=True)), tokens, config)

    wrap(Algorithm.advantages, around)


def _advantage_over_batch() -> None:
    from megarl.buffer.experience.operators import group_stats

    _advantages(lambda rewards, config: [group_stats(rewards)] * len(rewards))


def _advantage_std_overwritten() -> None:
    from megarl.buffer.experience.operators import group_stats

    def around(original: Any, rewards: Any) -> Any:
        found = original(rewards)
        return replaced(found, std=found.std * math.sqrt((found.size - 1) / found.size))

    wrap(group_stats, around)


def _advantage_of_shifted_groups() -> None:
    from megarl.buffer.experience.operators import group_stats

    def change(rewards: list[float], config: AlgorithmConfig) -> list[GroupStats]:
        shifted, size = rewards[1:] + rewards[:1], config.group_size
        found = [group_stats(shifted[first : first + size]) for first in range(0, len(shifted), size)]
        return [found[i // size] for i in range(len(rewards))]

    _advantages(change)


def _whitened_with_padding() -> None:
    from megarl.learn.algorithms.terms import token_rewards

    def around(original: Any, values: Any, kept: Any) -> Any:
        lengths, totals = kept.together(kept.lengths), kept.totals(torch.Tensor.double, values)
        places = len(lengths) * int(lengths.max())
        variance = kept.variance(totals.mean, torch.Tensor.double, values)
        return original(values, kept) + totals.mean * (1.0 - totals.number / places) / math.sqrt(variance + 1e-8)

    wrap(token_rewards.whitened, around)


def _whitened_by_rank() -> None:
    from megarl.learn.algorithms.terms import token_rewards
    from megarl.learn.algorithms.terms.reduction import alone

    wrap(token_rewards.whitened, lambda original, values, kept: original(values, replaced(kept, together=alone)))


def _rewards_one_token_early() -> None:
    from megarl.learn.algorithms import Algorithm

    def around(original: Any, self: Any, step: Any, config: Any) -> Any:
        found = original(self, step, config)
        return found._replace(advantages=found.advantages.roll(-1).masked_fill(~step.mask, 0.0))

    wrap(Algorithm.step_advantages, around)


def _value_after_the_end() -> None:
    from megarl.train.update import learner

    def around(original: Any, batch: Any, *args: Any) -> Any:
        found = original(batch, *args)
        return replaced(found, bootstrap=found.values[found.cu_seqlens[1:] - 1])

    wrap(learner.step_input, around)


def _gae(change: Callable[..., Any]) -> None:
    from megarl.ops import advantage

    wrap(advantage.gae, change)


def _episode_cut_one_token_late() -> None:
    def around(original: Any, rewards: Any, values: Any, cu_seqlens: Any, **named: Any) -> Any:
        late = cu_seqlens.clone()
        late[1:-1] += 1
        return original(rewards, values, late.clamp(max=len(rewards)), **named)

    _gae(around)


def _returns_are_values() -> None:
    def around(original: Any, rewards: Any, values: Any, *args: Any, **named: Any) -> Any:
        return original(rewards, values, *args, **named)[0], values.clone()

    _gae(around)


def _value_clip_of_itself() -> None:
    from megarl.learn.algorithms import token_returns

    wrap(token_returns.critic_loss, lambda original, values, old, *args: original(values, values.detach(), *args))


def _value_at_temperature() -> None:
    from megarl.learn.training.model import Model

    def around(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        found = original(self, *args, **named)
        return found / 0.7 if self.head is None else found

    wrap(Model.outputs, around)


def _each_micro_batch(before: Callable[[Any], None]) -> None:
    """Run Megatron's schedule for each micro-batch; ``before`` gets the model's chunks before each but the first."""
    from megarl.learn.training import schedule

    def around(original: Any, chunks: Any, sequences: Any, batches: Any, *args: Any, **named: Any) -> Any:
        if named["forward_only"]:
            return original(chunks, sequences, batches, *args, **named)
        collected: list[Any] = []
        for i in range(len(batches)):
            if i:
                before(chunks)
            collected += original(chunks, sequences, batches[i : i + 1], *args, **named)
        return collected

    wrap(schedule.run, around)


def _gradients_reduced_by_chunk() -> None:
    _each_micro_batch(lambda chunks: None)


def _gradients_of_last_micro_batch() -> None:
    def clear(chunks: Any) -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()

    _each_micro_batch(clear)


def _gradients_not_reduced() -> None:
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.finish_grad_sync = lambda *args, **named: None


def _gradients_not_zeroed() -> None:
    from megarl.learn.training.model import TrainedModel

    def around(original: Any, self: Any, *args: Any) -> Any:
        buffers = [buffer.grad_data for chunk in self.model.chunks for buffer in chunk.buffers]
        before = [data.clone() for data in buffers]
        found = original(self, *args)
        for data, old in zip(buffers, before, strict=True):
            data += old
        return found

    wrap(TrainedModel._backward, around)


def _clipping_by_own_norm() -> None:
    from megatron.core.optimizer import optimizer

    def own(grads: Any, norm_type: float = 2.0, grad_stats_parallel_group: Any = None) -> float:
        return math.sqrt(sum(float(grad.float().square().sum()) for grad in grads))

    optimizer.get_grad_norm_fp32 = own


def _gradient_cut_below_a_layer() -> None:
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training.model import TrainedModel

    def cut(layer: Any, inputs: Any, outputs: Any) -> Any:
        return outputs[0].detach().requires_grad_(), *outputs[1:]

    def around(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        stage: Any = unwrap(self.model.chunks[0])
        stage.decoder.layers[0].register_forward_hook(cut)

    wrap(TrainedModel.__init__, around)


def _schedule_by_micro_batch() -> None:
    from megarl.learn.training.optimizer import learning_rate

    wrap(learning_rate, lambda original, config, step: original(config, 2 * step))


def _weight_decay_on_norms() -> None:
    from megarl.learn.training.optimizer import Optimizer
    from megarl.weights.checkpoint.training.state import inner_optimizers

    def around(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["weight_decay"] = config.weight_decay

    wrap(Optimizer.set_hyperparameters, around)


def _update_does_nothing() -> None:
    from megarl.learn.training.optimizer import Optimizer

    calls = [0]

    def around(original: Any, self: Any, lr: float) -> Any:
        calls[0] += 1
        works = calls[0] <= UPDATES
        return original(self, lr) if works else self.gradient_norm()

    wrap(Optimizer.step, around)


def _head_in_low_precision() -> None:
    from megarl.train.inference.models import Models

    def around(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.head = replaced(self.head, float32=False)

    wrap(Models.__init__, around)


def _balance_of_each_micro_batch() -> None:
    from megarl.learn.models.experts import Router, UpdateSize

    wrap(Router.begin, lambda original, self, size: original(self, UpdateSize(size.most, size.tokens, size.most)))


def _balance_ignores_the_choice() -> None:
    from megarl.learn.models.experts import Router

    wrap(Router._losses, lambda original, self, *args: original(self, *args).detach())


def _packed_sequences_see_each_other() -> None:
    from megarl.learn.models import packed

    wrap(packed.packed_layout, lambda original, cu_seqlens, cp: original(cu_seqlens[[0, -1]], cp))


def _loss_on_the_next_sequence() -> None:
    from megarl.learn.batching import sequences

    def around(original: Any, samples: Any) -> Any:
        found = original(samples)
        found.mask[found.cu_seqlens[1:-1] - 1] = True
        return found

    wrap(sequences.of_samples, around)


def _preference_averaged_over_padding() -> None:
    from megarl.learn.algorithms import pairs

    def around(original: Any, x: Any, mask: Any, row: Any, num_rows: int) -> Any:
        width = torch.bincount(row, minlength=num_rows).max()
        return tuple(each / width for each in original(x, mask, row, num_rows))

    wrap(pairs.sums, around)


def _end_token_outside_the_preference() -> None:
    from megarl.learn.batching import sequences

    def around(original: Any, *args: Any) -> Any:
        found = original(*args)
        found.mask[found.cu_seqlens[1:] - 2] = False
        return found

    wrap(sequences.of_demonstrations, around)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "mean-of-each-micro-batch",
        "verl-project/verl#7200",
        "The mean over tokens is taken in each micro-batch, so the loss depends on how an update is split.",
        alarm="loss",
        job="packed",
        install=_mean_of_each_micro_batch,
    ),
    Fault(
        "mean-of-each-response",
        "allenai/open-instruct#1137",
        "Tokens of short responses weigh more: each response is averaged first, where a mean over tokens is set.",
        alarm="loss",
        job="tiny",
        install=_mean_of_each_response,
    ),
    Fault(
        "denominator-of-each-rank",
        "huggingface/trl#3231",
        "Each data-parallel rank divides by its own number of tokens.",
        alarm="loss",
        job="dp2",
        install=_denominator_of_each_rank,
        begins=2,  # in the job's first step both ranks have as many tokens
    ),
    Fault(
        "loss-divided-by-ranks",
        "verl-project/verl#5366",
        "The loss is divided by the number of data-parallel ranks, although gradients are summed over them.",
        alarm="loss",
        job="dp2",
        install=_loss_divided_by_ranks,
    ),
    Fault(
        "loss-divided-by-micro-batches",
        "modelscope/ms-swift#10116",
        "The loss has the denominator of the whole update and is divided by the number of micro-batches again.",
        alarm="loss",
        job="packed",
        install=_loss_divided_by_micro_batches,
    ),
    Fault(
        "truncated-in-denominator",
        "huggingface/trl#6369",
        "Truncated responses are left out of the sum of the loss and stay in its denominator.",
        alarm="loss",
        job="tiny",
        install=_truncated_in_denominator,
        settings=("algorithm.overlong_filtering=true", "rollout.max_response_tokens=3"),
    ),
    Fault(
        "masked-sample-counts-one",
        "radixark/miles#2796",
        "Each response without a token in the loss adds one token to the denominator.",
        alarm="loss",
        job="tiny",
        install=_masked_sample_counts_one,
        settings=("algorithm.overlong_filtering=true", "rollout.max_response_tokens=3"),
    ),
    Fault(
        "kl-sign",
        "nebuly-ai/optimate#298",
        "The KL to the reference is rewarded instead of penalized.",
        alarm="loss",
        job="kl",
        install=_kl_sign,
    ),
    Fault(
        "kl-without-reference",
        "allenai/open-instruct#535",
        "The KL in the loss is estimated by k1, whose gradient does not depend on the reference.",
        alarm="loss",
        job="kl",
        install=_kl_without_reference,
    ),
    Fault(
        "kl-only-logged",
        "rllm-org/rllm#26",
        "The KL is measured and logged, and its term is not in the loss.",
        alarm="loss",
        job="kl",
        install=_kl_only_logged,
    ),
    Fault(
        "kl-twice",
        "verl-project/verl#211",
        "The KL counts twice in the loss.",
        alarm="loss",
        job="kl",
        install=_kl_twice,
    ),
    Fault(
        "reference-temperature",
        "OpenRLHF/OpenRLHF#853",
        "The reference's log-probs are computed at temperature 1, the policy's at the sampling temperature.",
        alarm="reference",
        job="kl",
        install=_reference_temperature,
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "reference-shares-embedding",
        "CarperAI/trlx#517",
        "The reference shares the embedding with the actor, so training changes it.",
        alarm="reference",
        job="kl",
        install=_reference_shares_embedding,
        begins=2,
    ),
    Fault(
        "reference-follows-actor",
        "aburkov/theLMbook#8",
        "The reference becomes the current actor before every step, so the KL holds nothing.",
        alarm="reference",
        job="kl",
        install=_reference_follows_actor,
        begins=2,
    ),
    Fault(
        "old-logp-recomputed",
        "tensorforce/tensorforce#312",
        "Every update takes its own log-probs as the old ones, so ratios are always 1 and nothing is clipped.",
        alarm="old-logp",
        job="tiny",
        install=_old_logp_recomputed,
    ),
    Fault(
        "ratio-at-another-temperature",
        "marin-community/marin#1741",
        "The trainer computes log-probs at temperature 1, the engine samples at another one.",
        alarm="gap",
        job="tiny",
        install=_ratio_at_another_temperature,
        settings=("rollout.temperature=0.7",),
    ),
    Fault(
        "clip-left-out",
        "rllm-org/rllm#81",
        "The clipped surrogate is computed for the metrics, and the loss has the unclipped one.",
        alarm="loss",
        job="tiny",
        install=_clip_left_out,
        settings=("trainer.optimizer.lr=0.002",),
    ),
    Fault(
        "clip-before-advantage",
        "takuseno/ppo#3",
        "The smaller of ratio and clipped ratio is taken before it is multiplied by the advantage.",
        alarm="loss",
        job="tiny",
        install=_clip_before_advantage,
        settings=("trainer.optimizer.lr=0.002",),
    ),
    Fault(
        "clip-range-from-epsilon",
        "ChenmienTan/RL2#21",
        "Ratios are clipped to [ε, 1 + ε] instead of [1 − ε, 1 + ε].",
        alarm="loss",
        job="tiny",
        install=_clip_range_from_epsilon,
        settings=("trainer.optimizer.lr=0.002",),
    ),
    Fault(
        "entropy-only-logged",
        "Toni-SM/skrl#357",
        "The entropy bonus is computed and logged, and not added to the loss.",
        alarm="loss",
        job="tiny",
        install=_entropy_only_logged,
        settings=("algorithm.entropy_coef=0.01",),
    ),
    Fault(
        "entropy-sign",
        "pukkapies/dl-imperial-maths#8",
        "Entropy is penalized instead of rewarded.",
        alarm="loss",
        job="tiny",
        install=_entropy_sign,
        settings=("algorithm.entropy_coef=0.01",),
    ),
    Fault(
        "advantage-over-batch",
        "XU-YIJIE/grpo-flat#2",
        "Mean and standard deviation are those of all responses of the step, not of each group.",
        alarm="advantages",
        job="tiny",
        install=_advantage_over_batch,
    ),
    Fault(
        "advantage-std-overwritten",
        "NVIDIA-NeMo/RL#1423",
        "The unbiased standard deviation of a group is replaced by the biased one.",
        alarm="advantages",
        job="tiny",
        install=_advantage_std_overwritten,
    ),
    Fault(
        "advantage-of-shifted-groups",
        "allenai/open-instruct#1794",
        "Groups are cut from the rewards after a response was dropped, so their borders are shifted.",
        alarm="advantages",
        job="tiny",
        install=_advantage_of_shifted_groups,
        begins=2,
    ),
    Fault(
        "whitened-with-padding",
        "NovaSky-AI/SkyRL#1305",
        "The mean that whitens advantages includes positions that are not in the loss.",
        alarm="advantages",
        job="tiny",
        install=_whitened_with_padding,
        settings=("algorithm=reinforce_pp",),
    ),
    Fault(
        "whitened-by-rank",
        "THUDM/slime#2235",
        "Each rank whitens the advantages of its own tokens with its own statistics.",
        alarm="advantages",
        job="dp2",
        install=_whitened_by_rank,
        settings=("algorithm=reinforce_pp",),
        within=0,
    ),
    Fault(
        "rewards-one-token-early",
        "openai/spinningup#50",
        "Rewards and advantages belong to the token before the one that earned them.",
        alarm="advantages",
        job="ppo",
        install=_rewards_one_token_early,
    ),
    Fault(
        "value-after-the-end",
        "alibaba/ROLL#447",
        "The advantage of a finished response's last token includes the value of a masked position.",
        alarm="critic",
        job="ppo",
        install=_value_after_the_end,
        begins=2,
    ),
    Fault(
        "episode-cut-one-token-late",
        "automl/Mighty#126",
        "Advantage estimation ends each response one token late, so values of the next one leak in.",
        alarm="advantages",
        job="ppo",
        install=_episode_cut_one_token_late,
        within=0,
    ),
    Fault(
        "returns-are-values",
        "vwxyzjn/cleanrl#337",
        "Returns are made of the advantages' zeros: the critic is trained on its own values.",
        alarm="critic",
        job="ppo",
        install=_returns_are_values,
    ),
    Fault(
        "value-clip-of-itself",
        "tensorflow/agents#352",
        "The value is clipped around itself instead of the value before the update, so the clip has no effect.",
        alarm="critic",
        job="ppo",
        install=_value_clip_of_itself,
        settings=("algorithm.value_clip=0.01", "critic.optimizer.lr=0.01"),
    ),
    Fault(
        "value-at-temperature",
        "THUDM/slime#1928",
        "Values for the advantages are divided by the sampling temperature, like logits.",
        alarm="critic",
        job="ppo",
        install=_value_at_temperature,
        settings=("rollout.temperature=0.7",),
        begins=2,
    ),
    Fault(
        "gradients-reduced-by-chunk",
        "NVIDIA-NeMo/RL#3660",
        "Gradients are reduced over ranks after every micro-batch, so earlier ones are added again.",
        alarm="gradient",
        job="packed",
        install=_gradients_reduced_by_chunk,
    ),
    Fault(
        "gradients-of-last-micro-batch",
        "NVIDIA-NeMo/Automodel#3530",
        "Gradients are cleared before every micro-batch, so only the last one trains.",
        alarm="gradient",
        job="packed",
        install=_gradients_of_last_micro_batch,
    ),
    Fault(
        "gradients-not-reduced",
        "jingyaogong/minimind#853",
        "Gradients are never reduced over data-parallel ranks: each trains on its own share.",
        alarm="gradient",
        job="dp2",
        install=_gradients_not_reduced,
    ),
    Fault(
        "gradients-not-zeroed",
        "huggingface/transformers#340",
        "The gradients of an update are added to those of the update before.",
        alarm="gradient",
        job="tiny",
        install=_gradients_not_zeroed,
    ),
    Fault(
        "clipping-by-own-norm",
        "areal-project/AReaL#312",
        "Each rank clips by the norm of its own shard of the gradients.",
        alarm="gradient",
        job="dp2",
        install=_clipping_by_own_norm,
        settings=("trainer.optimizer.clip_grad=0.01",),
    ),
    Fault(
        "gradient-cut-below-a-layer",
        "QwenLM/Qwen-VL#124",
        "An assignment cuts the graph after the first layer, so the layers below it never get a gradient.",
        alarm="frozen",
        job="tiny",
        install=_gradient_cut_below_a_layer,
    ),
    Fault(
        "schedule-by-micro-batch",
        "starVLA/starVLA#210",
        "The learning-rate schedule moves on with every micro-batch, so it decays too fast.",
        alarm="learning-rate",
        job="packed",
        install=_schedule_by_micro_batch,
        settings=("trainer.optimizer.decay_steps=8", "trainer.optimizer.min_lr=0.0"),
        begins=2,
    ),
    Fault(
        "weight-decay-on-norms",
        "ServiceNow/Fast-LLM#545",
        "Weight decay shrinks the weights of norms, too.",
        alarm="optimizer",
        job="tiny",
        install=_weight_decay_on_norms,
        settings=("trainer.optimizer.weight_decay=0.1",),
    ),
    Fault(
        "update-does-nothing",
        "ohdearquant/lattice#798",
        "The optimizer reports a step and changes no weight.",
        alarm="optimizer",
        job="tiny",
        install=_update_does_nothing,
        begins=2,
    ),
    Fault(
        "head-in-low-precision",
        "OpenRLHF/OpenRLHF#634",
        "Logits are computed in bfloat16, although float32 is set for the head.",
        alarm="precision",
        job="tiny",
        install=_head_in_low_precision,
        settings=("model.dtype=bfloat16", "model.head_dtype=float32"),
    ),
    Fault(
        "balance-of-each-micro-batch",
        "NVIDIA/Megatron-LM#3768",
        "The load-balancing loss is not divided by the size of the update, so its strength depends on the split.",
        alarm="router",
        job="moe",
        install=_balance_of_each_micro_batch,
        settings=("model.router.aux_loss_coef=0.01", "trainer.max_tokens_per_micro_batch=160"),
    ),
    Fault(
        "balance-ignores-the-choice",
        "mindspore-ai/hyper-parallel#752",
        "The load-balancing loss is constant: it does not depend on the experts that tokens chose.",
        alarm="router",
        job="moe",
        install=_balance_ignores_the_choice,
        settings=("model.router.aux_loss_coef=0.01",),
    ),
    Fault(
        "packed-sequences-see-each-other",
        "huggingface/nanoVLM#204",
        "Attention reaches over the borders of packed sequences.",
        alarm="probe",
        job="packed",
        install=_packed_sequences_see_each_other,
        within=0,
    ),
    Fault(
        "loss-on-the-next-sequence",
        "pytorch/torchtitan#3347",
        "The last token of a packed sequence is trained to predict the first token of the next one.",
        alarm="mask",
        job="packed",
        install=_loss_on_the_next_sequence,
    ),
    Fault(
        "preference-averaged-over-padding",
        "QwenAudio/CosyVoice#1449",
        "The log-probs of a response are averaged over all positions of the padded rows instead of summed.",
        alarm="loss",
        job="dpo",
        install=_preference_averaged_over_padding,
    ),
    Fault(
        "end-token-outside-the-preference",
        "PaddlePaddle/PaddleFormers#4909",
        "The end tokens are left out of the log-probs of chosen and rejected responses.",
        alarm="mask",
        job="dpo",
        install=_end_token_outside_the_preference,
    ),
)
