"""Faults of ``megarl exam`` that TRL's trainers can have, each as a change of one of TRL's functions or of its rows.

Written for trl 1.16 and transformers 5.19. A text that a function no longer has is a LookupError, so no fault is left
out in silence.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers import trainer as transformers_trainer
from trl import DPOTrainer, GRPOTrainer
from trl.rewards import other_rewards
from trl.trainer import dpo_trainer, utils


@dataclass
class Course:
    """What a run is made of; a fault changes it before the run.

    Attributes:
        train: Rows: ``prompt`` (messages) and ``truth``, or a preference's columns.
        eval: Held-out rows.
        made: Called with each trainer after it is made.
        again: Called before the second start of a run that resumes, with the checkpoint.
    """

    train: list[dict[str, Any]]
    eval: list[dict[str, Any]]
    made: list[Callable[[Any], None]] = field(default_factory=list)
    again: list[Callable[[Path], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: Of the same fault in ``megarl exam``.
        job: Key of ``trl_exam.JOBS``.
        install: Puts the fault into TRL or into the course.
        settings: Arguments of the trainer's config, in the clean run too.
    """

    name: str
    job: str
    install: Callable[[Course], None]
    settings: Mapping[str, Any] = field(default_factory=dict)


def edit(owner: Any, name: str, *changes: tuple[str, str], **names: Any) -> None:
    """Replace texts of a function's source; ``names`` are what the new texts may call.

    Raises LookupError for a text that the function does not have.
    """
    original = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in changes:
        if old not in source:
            raise LookupError(f"{owner.__name__}.{name} does not have {old!r}")
        source = source.replace(old, new)
    source = source.replace("super()", f"super({owner.__name__}, self)")
    space = {**vars(sys.modules[original.__module__]), **names}
    exec(compile(source, f"<{name} with a fault>", "exec"), space)  # noqa: S102
    setattr(owner, name, space[name])


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *args, **kwargs)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: around(original, *args, **more))


def edited(owner: Any, name: str, *changes: tuple[str, str], **names: Any) -> Callable[[Course], None]:
    return lambda course: edit(owner, name, *changes, **names)


def made(act: Callable[[Any], None]) -> Callable[[Course], None]:
    return lambda course: course.made.append(act)


def again(act: Callable[[], None]) -> Callable[[Course], None]:
    return lambda course: course.again.append(lambda checkpoint: act())


def loss(*changes: tuple[str, str]) -> Callable[[Course], None]:
    return edited(GRPOTrainer, "_compute_loss", *changes)


def scored(*changes: tuple[str, str], **names: Any) -> Callable[[Course], None]:
    return edited(GRPOTrainer, "_generate_and_score_completions", *changes, **names)


def sampled(change: Callable[[Any, list[list[int]]], list[list[int]]]) -> Callable[[Course], None]:
    """Change the sampled tokens: a function of the trainer and the responses."""

    def around(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        ids, logprobs = original(self, *args, **more)
        return change(self, ids), logprobs

    return lambda course: wrap(GRPOTrainer, "_generate_single_turn", around)


def prompts(change: Callable[[Any, list[list[int]]], list[list[int]]]) -> Callable[[Course], None]:
    """Change the prompts' tokens: a function of the trainer and the prompts."""

    def around(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        ids, *rest = original(self, *args, **more)
        return change(self, ids), *rest

    return lambda course: wrap(GRPOTrainer, "_tokenize_prompts", around)


def rewards(change: Callable[..., Any]) -> Callable[[Course], None]:
    """Change rewards: a function of rewards (responses × functions), and of the trainer where it has two parameters."""

    def around(original: Any, self: Any, inputs: Any, texts: Any, completions: Any, ids: Any) -> Any:
        return change(original(self, inputs, texts, completions, ids), self, ids)

    return lambda course: wrap(GRPOTrainer, "_calculate_rewards", around)


def asked(change: Callable[..., Any]) -> Callable[[Course], None]:
    """Change what reward functions get: ``change(inputs, prompts, completions)`` returns the three."""

    def around(original: Any, self: Any, inputs: Any, texts: Any, completions: Any, ids: Any) -> Any:
        return original(self, *change(inputs, texts, completions), ids)

    return lambda course: wrap(GRPOTrainer, "_calculate_rewards", around)


def rows(change: Callable[[list[Any]], list[Any]]) -> Callable[[Course], None]:
    def install(course: Course) -> None:
        course.train = change(course.train)

    return install


def with_content(row: dict[str, Any], content: str) -> dict[str, Any]:
    return {**row, "prompt": [{**row["prompt"][-1], "content": content}]}


def text_of(completion: Any) -> str:
    return str(completion[0]["content"])


# ---------------------------------------------------------------- losses

KL = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
ADDED = "per_token_loss = per_token_loss + self.beta * per_token_kl"
DENOMINATOR = 'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes'
COUNT = "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()"
BONUS = "loss = loss - apply_coef * entropy_loss"
MEAN = "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)"
MEANS = "mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)"
STD = "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)"
STDS = "std_rewards = std_rewards.repeat_interleave(num_generations, dim=0)"
MASK = 'mask = completion_mask if "tool_mask" not in inputs'
CLIPPED = "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)"
REFERENCE = "self.ref_model, temperature=self.temperature"


def shares_embedding(trainer: Any) -> None:
    trainer.ref_model.get_input_embeddings().weight = trainer.model.get_input_embeddings().weight


def follows_actor(course: Course) -> None:
    def around(original: Any, self: Any, *args: Any) -> Any:
        self.ref_model.load_state_dict(self.model.state_dict())
        return original(self, *args)

    wrap(GRPOTrainer, "_generate_and_score_completions", around)


def cleared_before_each(course: Course) -> None:
    def around(original: Any, self: Any, model: Any, *args: Any) -> Any:
        model.zero_grad()
        return original(self, model, *args)

    wrap(GRPOTrainer, "training_step", around)


def never_cleared(trainer: Any) -> None:
    trainer.model.zero_grad = lambda *args, **more: None


def cut_below(trainer: Any) -> None:
    trainer.model.model.layers[0].register_forward_hook(
        lambda layer, inputs, output: output.detach().requires_grad_(output.requires_grad)
    )


def schedule_by_micro_batch(course: Course) -> None:
    def around(original: Any, self: Any, *args: Any) -> Any:
        found = original(self, *args)
        if not self.accelerator.sync_gradients:
            self.lr_scheduler.step()
        return found

    wrap(GRPOTrainer, "training_step", around)


def decays_all(course: Course) -> None:
    wrap(
        Trainer,
        "get_decay_parameter_names",
        lambda original, self, model: [name for name, _ in model.named_parameters()],
    )


def updates_nothing(trainer: Any) -> None:
    create, calls = trainer.create_optimizer, itertools.count(1)

    def created(*args: Any) -> Any:
        optimizer = create(*args)
        step = optimizer.step
        optimizer.step = lambda *given, **more: step(*given, **more) if next(calls) <= 2 else None
        return optimizer

    trainer.create_optimizer = created


def head_in_bfloat16(course: Course) -> None:
    edit(
        GRPOTrainer,
        "__init__",
        ("cast_lm_head_to_fp32=args.cast_lm_head_to_fp32", "cast_lm_head_to_fp32=False"),
        ("_cast_lm_head_to_fp32(model)\n", "pass\n"),
    )


def drop_of_attention(trainer: Any) -> None:
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def of_choice(course: Course) -> None:
    from transformers.models.mixtral import modeling_mixtral

    wrap(modeling_mixtral, "load_balancing_loss_func", lambda original, *args: original(*args).detach() * 0.0 + 1.0)


# ---------------------------------------------------------------- rows and their order


def first_match(found: list[Any]) -> list[Any]:
    first: dict[int, Any] = {}
    for row in found:
        first.setdefault(len(row["prompt"][-1]["content"]), row["truth"])
    return [{**row, "truth": first[len(row["prompt"][-1]["content"])]} for row in found]


def leaked(course: Course) -> None:
    course.eval = course.train[: len(course.eval)]


def same_order(original: Any, self: Any) -> Any:
    self.generator.manual_seed(self.seed)
    return original(self)


def swapped(found: list[Any]) -> list[Any]:
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in found]


# ---------------------------------------------------------------- sampling and tokens


def copied(half: bool) -> Callable[[Any, list[list[int]]], list[list[int]]]:
    def change(self: Any, ids: list[list[int]]) -> list[list[int]]:
        size = self.num_generations
        return [ids[i // size * size + (i % size % (size // 2) if half else 0)] for i in range(len(ids))]

    return change


def without_end(self: Any, ids: list[list[int]]) -> list[list[int]]:
    return [one[:-1] if len(one) > 1 and one[-1] in self.eos_token_ids else one for one in ids]


def with_end(self: Any, ids: list[list[int]]) -> list[list[int]]:
    return [one if one[-1] in self.eos_token_ids else [*one[:-1], self.eos_token_ids[0]] for one in ids]


def knows_no_end(trainer: Any) -> None:
    trainer.eos_token_ids = []
    trainer.generation_config.eos_token_id = None
    trainer.generation_kwargs["eos_token_id"] = None


def set_generation(**values: Any) -> Callable[[Course], None]:
    def act(trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer.generation_config, name, value)

    return made(act)


def without_special(self: Any, ids: list[list[int]]) -> list[list[int]]:
    texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
    return [self.processing_class(text)["input_ids"] for text in texts]


def template_with_option(course: Course) -> None:
    """TRL passes the option on; the fault is that it does not."""
    edit(GRPOTrainer, "_tokenize_prompts", ("**self.chat_template_kwargs,", ""))


def cut_texts(inputs: Any, texts: Any, completions: Any) -> Any:
    return inputs, texts, [[{**one[0], "content": text_of(one)[:2]}] for one in completions]


# ---------------------------------------------------------------- evaluation


def of_before(course: Course) -> None:
    kept: dict[str, Any] = {}

    def around(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(kept or own)
        kept.update(own)
        try:
            return original(self, *args, **more)
        finally:
            self.model.load_state_dict(own)

    wrap(GRPOTrainer, "evaluate", around)


def twice_in_evaluations(self: Any, ids: list[list[int]]) -> list[list[int]]:
    return ids if self.model.training else [[*one[:1], *one] for one in ids]


def last_batch(course: Course) -> None:
    def around(original: Any, self: Any, *args: Any) -> Any:
        self.args.dataloader_drop_last = True
        try:
            return original(self, *args)
        finally:
            self.args.dataloader_drop_last = False

    wrap(GRPOTrainer, "get_eval_dataloader", around)


def other_rows(course: Course) -> None:
    def around(original: Any, self: Any, eval_dataset: Any = None, **more: Any) -> Any:
        chosen = self.eval_dataset.shuffle(seed=self.state.global_step).select(range(len(course.eval) // 2))
        return original(self, chosen, **more)

    wrap(GRPOTrainer, "evaluate", around)


def without_truncated(found: Any, self: Any, ids: Any) -> Any:
    if not self.model.training:
        found = found.clone()
        found[[one[-1] not in self.eos_token_ids for one in ids]] = torch.nan
    return found


# ---------------------------------------------------------------- a resume


def loaded(act: Callable[[Any], None]) -> Callable[[Course], None]:
    """Call ``act`` with the trainer after it has loaded optimizer and schedule."""

    def around(original: Any, self: Any, checkpoint: Any) -> None:
        original(self, checkpoint)
        if checkpoint is not None:
            act(self)

    return again(lambda: wrap(GRPOTrainer, "_load_optimizer_and_scheduler", around))


def schedule_at(trainer: Any, step: int) -> None:
    state = trainer.lr_scheduler.state_dict()
    rates = [function(step) for function in trainer.lr_scheduler.lr_lambdas]
    trainer.lr_scheduler.load_state_dict({**state, "last_epoch": step, "_step_count": step + 1})
    for group, base, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.base_lrs, rates, strict=True):
        group["lr"] = base * rate


def moments_lost(trainer: Any) -> None:
    trainer.optimizer.optimizer.state.clear()


def moments_swapped(trainer: Any) -> None:
    by_shape: dict[Any, list[Any]] = {}
    for moments in trainer.optimizer.optimizer.state.values():
        by_shape.setdefault(moments["exp_avg"].shape, []).append(moments)
    for equal in by_shape.values():
        kept = [moments["exp_avg"].clone() for moments in equal]
        for moments, other in zip(equal, kept[1:] + kept[:1], strict=True):
            moments["exp_avg"].copy_(other)


def counted_anew(trainer: Any) -> None:
    for moments in trainer.optimizer.optimizer.state.values():
        moments["step"] = torch.ones_like(torch.as_tensor(moments["step"]))


def skipping(change: Callable[[int], int]) -> Callable[[], None]:
    def act() -> None:
        wrap(
            transformers_trainer,
            "skip_first_batches",
            lambda original, dataloader, number=0: original(dataloader, change(number)),
        )

    return act


def other_seed() -> None:
    def around(original: Any, self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **{**more, "seed": more["seed"] + 1})

    wrap(utils.RepeatSampler, "__init__", around)


def rows_changed(course: Course) -> None:
    course.again.append(lambda checkpoint: course.train.reverse())


def reseeded() -> None:
    wrap(Trainer, "_load_rng_state", lambda original, self, checkpoint: transformers_trainer.set_seed(self.args.seed))


def counted_twice() -> None:
    original = TrainerState.load_from_json

    def load(path: str) -> Any:
        state = original(path)
        state.global_step += 1
        return state

    TrainerState.load_from_json = load


def reference_of_actor() -> None:
    def around(original: Any, self: Any, checkpoint: Any, *args: Any, **more: Any) -> None:
        original(self, checkpoint, *args, **more)
        self.ref_model.load_state_dict(self.model.state_dict())

    wrap(Trainer, "_load_from_checkpoint", around)


def actor_of_start() -> None:
    wrap(Trainer, "_load_from_checkpoint", lambda original, *args, **more: None)


def half(course: Course) -> None:
    def cut(checkpoint: Path) -> None:
        last = max((path for path in checkpoint.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(last, last.stat().st_size // 2)

    course.again.append(cut)


# ---------------------------------------------------------------- rewards


def every_fourth(value: float) -> Callable[..., Any]:
    def change(found: Any, self: Any, ids: Any) -> Any:
        found = found.clone()
        found[::4, 0] = value
        return found

    return change


def shifted(found: Any, self: Any, ids: Any) -> Any:
    groups = found.view(-1, self.num_generations, found.shape[1])
    return torch.cat([groups[:, :1], groups[:, :-1]], dim=1).view_as(found)


def too_short(course: Course) -> None:
    def act(trainer: Any) -> None:
        score = trainer.reward_funcs[0]
        trainer.reward_funcs[0] = lambda **more: score(**more)[:-1]

    course.made.append(act)


def whole_ones_zero(found: Any, self: Any, ids: Any) -> Any:
    found = found.clone()
    found[[one[-1] in self.eos_token_ids for one in ids]] = 0.0
    return found


def of_task(found: Any, self: Any, ids: Any) -> Any:
    return found[::8].repeat_interleave(8, dim=0)


def of_last_step(course: Course) -> None:
    kept: list[Any] = []

    def around(original: Any, self: Any, *args: Any) -> Any:
        kept.append(original(self, *args))
        return kept[max(0, len(kept) - 2)]

    wrap(GRPOTrainer, "_calculate_rewards", around)


def of_neighbour(inputs: Any, texts: Any, completions: Any) -> Any:
    truths = [row["truth"] for row in inputs]
    other = truths[8:] + truths[:8]
    return [{**row, "truth": truth} for row, truth in zip(inputs, other, strict=True)], texts, completions


def with_prompt(inputs: Any, texts: Any, completions: Any) -> Any:
    pairs = zip(texts, completions, strict=True)
    return inputs, texts, [[{**one[0], "content": f"{text[-1]['content']} {text_of(one)}"}] for text, one in pairs]


def tail(inputs: Any, texts: Any, completions: Any) -> Any:
    return inputs, texts, [[{**one[0], "content": text_of(one)[-1:]}] for one in completions]


def anywhere(course: Course) -> None:
    def act(trainer: Any) -> None:
        trainer.reward_funcs[0] = lambda completions, truth, **more: [
            float(right[-1] in text_of(one)) for one, right in zip(completions, truth, strict=True)
        ]

    course.made.append(act)


def second_weight_zero(trainer: Any) -> None:
    trainer.reward_weights[1] = 0.0


# ---------------------------------------------------------------- groups of a step


def generations_again(course: Course) -> None:
    kept: list[Any] = []

    def around(original: Any, self: Any, *args: Any) -> Any:
        if not self.model.training:
            return original(self, *args)
        kept.append(original(self, *args))
        return kept[max(0, len(kept) - 2)]

    wrap(GRPOTrainer, "_generate_and_score_completions", around)


def partial(original: Any, self: Any, *args: Any) -> Any:
    found = original(self, *args)
    size = found["completion_ids"].shape[0]
    kept = size - 2 * self.num_generations
    return {name: value[:kept] if value.dim() and len(value) == size else value for name, value in found.items()}


def by_prompt(values: Any, inputs: Any) -> Any:
    """Mean of the rewards with equal last digit of the truth, for each response."""
    keys = [row["truth"][-1] for row in inputs]
    means = {key: values[[i for i, other in enumerate(keys) if other == key]].mean() for key in set(keys)}
    return torch.stack([means[key] for key in keys])


LATE = {"learning_rate": 0.005}
FILTERED = {"mask_truncated_completions": True, "max_completion_length": 3}
COLD = {"temperature": 0.7}
FALLING = {"lr_scheduler_type": "linear"}
FAULTS: tuple[Fault, ...] = (
    Fault(
        "mean-of-each-micro-batch",
        "accumulated",
        loss((DENOMINATOR, "normalizer = mask.sum().clamp(min=1.0) * self.args.steps_per_generation")),
    ),
    Fault(
        "mean-of-each-response",
        "tiny",
        loss(('if self.loss_type in ["grpo", "sapo"]:\n', 'if self.loss_type in ["grpo", "sapo", "dapo"]:\n')),
    ),
    Fault(
        "loss-divided-by-micro-batches",
        "accumulated",
        loss((DENOMINATOR, f"{DENOMINATOR} * self.current_gradient_accumulation_steps")),
    ),
    Fault(
        "truncated-in-denominator",
        "tiny",
        scored((COUNT, "num_items_in_batch = torch.tensor(sum(map(len, completion_ids_list)))")),
        FILTERED,
    ),
    Fault("masked-sample-counts-one", "tiny", scored((COUNT, f"{COUNT} + is_truncated.sum()")), FILTERED),
    Fault("kl-sign", "kl", loss((ADDED, ADDED.replace("+", "-")))),
    Fault("kl-without-reference", "kl", loss((KL, "per_token_logps - ref_per_token_logps"))),
    Fault("kl-only-logged", "kl", loss((ADDED, f"{ADDED} * 0.0"))),
    Fault("kl-twice", "kl", loss((ADDED, f"{ADDED} * 2.0"))),
    Fault(
        "reference-temperature",
        "kl",
        edited(GRPOTrainer, "__init__", (REFERENCE, "self.ref_model, temperature=1.0")),
        COLD,
    ),
    Fault("reference-shares-embedding", "kl", made(shares_embedding)),
    Fault("reference-follows-actor", "kl", follows_actor),
    Fault(
        "old-logp-recomputed",
        "tiny",
        loss(('old_per_token_logps = inputs.get("old_per_token_logps")', "old_per_token_logps = None")),
        LATE,
    ),
    Fault(
        "ratio-at-another-temperature",
        "tiny",
        edited(
            GRPOTrainer,
            "__init__",
            ("else self.model,\n        temperature=self.temperature", "else self.model,\n        temperature=1.0"),
        ),
        COLD,
    ),
    Fault("clip-left-out", "tiny", loss((CLIPPED, "per_token_loss = -per_token_loss1")), LATE),
    Fault(
        "clip-before-advantage",
        "tiny",
        loss((CLIPPED, "per_token_loss = -torch.min(coef_1, coef_2) * advantages")),
        LATE,
    ),
    Fault("clip-range-from-epsilon", "tiny", loss(("1 - self.epsilon_low", "self.epsilon_low")), LATE),
    Fault("entropy-only-logged", "tiny", loss((BONUS, "loss = loss")), {"entropy_coef": 0.01}),
    Fault("entropy-sign", "tiny", loss((BONUS, BONUS.replace("-", "+"))), {"entropy_coef": 0.01}),
    Fault(
        "advantage-over-batch",
        "tiny",
        scored(
            (MEANS, "mean_grouped_rewards = torch.nanmean(rewards).expand_as(rewards)"),
            (STDS, "std_rewards = nanstd(rewards).expand_as(rewards)"),
        ),
    ),
    Fault(
        "advantage-std-overwritten",
        "tiny",
        scored((STDS, f"{STDS} * ((num_generations - 1) / num_generations) ** 0.5")),
    ),
    Fault(
        "advantage-of-shifted-groups",
        "tiny",
        scored(
            (MEAN, MEAN.replace("rewards.view", "rewards.roll(-1).view")),
            (STD, STD.replace("rewards.view", "rewards.roll(-1).view")),
        ),
    ),
    Fault("gradients-of-last-micro-batch", "accumulated", cleared_before_each),
    Fault("gradients-not-zeroed", "tiny", made(never_cleared)),
    Fault("gradient-cut-below-a-layer", "tiny", made(cut_below)),
    Fault("schedule-by-micro-batch", "accumulated", schedule_by_micro_batch, FALLING),
    Fault("weight-decay-on-norms", "tiny", decays_all, {"weight_decay": 0.1}),
    Fault("update-does-nothing", "tiny", made(updates_nothing)),
    Fault(
        "head-in-low-precision",
        "tiny",
        head_in_bfloat16,
        {"model_init_kwargs": {"dtype": "bfloat16"}, "cast_lm_head_to_fp32": True},
    ),
    Fault(
        "balance-of-each-micro-batch",
        "experts",
        loss(("self.router_aux_loss_coef * aux_loss / normalizer", "self.router_aux_loss_coef * aux_loss")),
    ),
    Fault("balance-ignores-the-choice", "experts", of_choice),
    Fault(
        "preference-averaged-over-padding",
        "dpo",
        edited(
            DPOTrainer,
            "_compute_loss",
            ("logps = per_token_logps.sum(dim=1)  #", "logps = per_token_logps.mean(dim=1)  #"),
            ("ref_logps = ref_per_token_logps.sum(dim=1)  #", "ref_logps = ref_per_token_logps.mean(dim=1)  #"),
        ),
    ),
    Fault(
        "end-token-outside-the-preference",
        "dpo",
        edited(
            dpo_trainer.DataCollatorForPreference,
            "torch_call",
            ('+ [1] * len(example["chosen_ids"])', '+ [1] * (len(example["chosen_ids"]) - 1) + [0]'),
            ('+ [1] * len(example["rejected_ids"])', '+ [1] * (len(example["rejected_ids"]) - 1) + [0]'),
        ),
    ),
    Fault("rows-duplicated", "tiny", rows(lambda found: found[: len(found) // 10] * 10)),
    Fault("held-out-leaked", "evaluated", leaked),
    Fault(
        "answers-shifted",
        "tiny",
        rows(
            lambda found: [
                *found[:3],
                *({**row, "truth": other["truth"]} for row, other in itertools.pairwise(found[3:])),
            ]
        ),
    ),
    Fault("answers-of-first-match", "tiny", rows(first_match)),
    Fault(
        "answer-in-prompt",
        "tiny",
        rows(lambda found: [with_content(row, f"{row['prompt'][-1]['content']} {row['truth']}") for row in found]),
    ),
    Fault("question-not-rendered", "tiny", rows(lambda found: [with_content(row, "=") for row in found])),
    Fault("rows-dropped", "tiny", rows(lambda found: found[::2])),
    Fault(
        "first-rows-only",
        "tiny",
        edited(GRPOTrainer, "_get_train_sampler", ("data_source=dataset", "data_source=dataset.select(range(12))")),
    ),
    Fault("same-order-every-epoch", "few", lambda course: wrap(utils.RepeatSampler, "__iter__", same_order)),
    Fault(
        "drawn-with-replacement",
        "few",
        edited(
            utils.RepeatSampler,
            "__iter__",
            (
                "torch.randperm(self.num_samples, generator=self.generator)",
                "torch.randint(self.num_samples, (self.num_samples,), generator=self.generator)",
            ),
        ),
    ),
    Fault("chosen-rejected-swapped", "dpo", rows(swapped)),
    Fault(
        "pairs-identical",
        "dpo",
        rows(lambda found: [row if i % 3 else {**row, "rejected": row["chosen"]} for i, row in enumerate(found)]),
    ),
    Fault("penalty-on", "tiny", set_generation(repetition_penalty=1.3)),
    Fault("defaults-of-checkpoint", "tiny", set_generation(top_k=2)),
    Fault("dropout-on", "tiny", made(drop_of_attention)),
    Fault("equal-samples", "tiny", sampled(copied(half=False))),
    Fault("half-equal-samples", "tiny", sampled(copied(half=True))),
    Fault("end-token-dropped", "tiny", sampled(without_end)),
    Fault("end-token-forced", "tiny", sampled(with_end), {"max_completion_length": 3}),
    Fault("end-token-ignored", "tiny", made(knows_no_end)),
    Fault("weights-of-before", "evaluated", of_before),
    Fault("system-block-twice", "evaluated", prompts(twice_in_evaluations)),
    Fault("last-batch-dropped", "evaluated", last_batch),
    Fault("other-rows-each-time", "evaluated", other_rows),
    Fault("failures-left-out", "evaluated", rewards(without_truncated), {"max_completion_length": 2}),
    Fault("lr-restarted", "resume", loaded(lambda trainer: schedule_at(trainer, 0)), FALLING),
    Fault(
        "lr-counted-twice",
        "resume",
        loaded(lambda trainer: schedule_at(trainer, 2 * trainer.state.global_step)),
        FALLING,
    ),
    Fault("moments-lost", "resume", loaded(moments_lost)),
    Fault("moments-swapped", "resume", loaded(moments_swapped)),
    Fault("bias-correction-lost", "resume", loaded(counted_anew)),
    Fault("data-restarted", "resume", again(skipping(lambda number: 0))),
    Fault("data-skipped", "resume", again(skipping(lambda number: number + 2))),
    Fault("data-of-other-seed", "resume", again(other_seed)),
    Fault("rows-changed", "resume", rows_changed),
    Fault("seeds-repeated", "resume", again(reseeded)),
    Fault("step-counted-twice", "resume", again(counted_twice)),
    Fault("reference-of-actor", "resume", again(reference_of_actor), {"beta": 0.5}),
    Fault("actor-of-start", "resume", again(actor_of_start)),
    Fault("half-checkpoint", "resume", half),
    Fault("grader-failure-zero", "tiny", rewards(every_fourth(0.0))),
    Fault("unverified-is-right", "tiny", rewards(every_fourth(1.0))),
    Fault("verdicts-shifted", "tiny", rewards(shifted)),
    Fault("short-reward-list", "tiny", too_short),
    Fault("prompt-is-scored", "tiny", asked(with_prompt)),
    Fault("answer-anywhere", "tiny", anywhere),
    Fault("tail-window", "tiny", asked(tail)),
    Fault("every-test-passes", "tiny", rewards(lambda found, self, ids: torch.ones_like(found))),
    Fault("zeroed-as-truncated", "tiny", rewards(whole_ones_zero)),
    Fault("reward-sign", "tiny", rewards(lambda found, self, ids: -found)),
    Fault("score-clipped", "wide", rewards(lambda found, self, ids: found.clamp(0.0, 1.0))),
    Fault("form-part-zero", "overlong", rewards(lambda found, self, ids: found * torch.tensor([1.0, 0.0]))),
    Fault("truth-of-neighbour", "tiny", asked(of_neighbour)),
    Fault("verdict-cached-by-task", "tiny", rewards(of_task)),
    Fault("rewards-of-last-step", "tiny", of_last_step),
    Fault(
        "masked-in-baseline",
        "unscored",
        scored((MEAN, MEAN.replace("torch.nanmean(rewards.view", "torch.mean(rewards.nan_to_num(0.0).view"))),
    ),
    Fault("verdictless-trained", "unscored", scored(("rewards[unscorable_mask] = torch.nan", "pass"))),
    Fault(
        "baseline-across-prompts",
        "tiny",
        scored(
            (MEAN, MEAN.replace("rewards.view(-1, num_generations)", "rewards.view(num_generations, -1).T")),
            (MEANS, "mean_grouped_rewards = mean_grouped_rewards.repeat(num_generations)"),
            (STD, STD.replace("rewards.view(-1, num_generations)", "rewards.view(num_generations, -1).T")),
            (STDS, "std_rewards = std_rewards.repeat(num_generations)"),
        ),
    ),
    Fault("overlong-skipped", "overlong", made(second_weight_zero)),
    Fault(
        "overlong-from-zero",
        "overlong",
        edited(
            other_rewards._SoftOverlongPunishment,
            "__call__",
            ("self.max_completion_len - self.soft_punish_cache", "self.soft_punish_cache"),
        ),
    ),
    Fault(
        "groups-merged",
        "tiny",
        scored((MEANS, "mean_grouped_rewards = by_prompt(rewards, inputs)"), by_prompt=by_prompt),
    ),
    Fault("groups-of-one", "tiny", scored((MEANS, "mean_grouped_rewards = rewards.clone()"))),
    Fault("groups-again", "tiny", generations_again),
    Fault("partial-batch", "tiny", lambda course: wrap(GRPOTrainer, "_generate_and_score_completions", partial)),
    Fault(
        "end-token-untrained",
        "tiny",
        loss((MASK, f"completion_mask = completion_mask * (completion_ids != self.eos_token_ids[0])\n    {MASK}")),
    ),
    Fault(
        "end-token-taken-for-padding",
        "padded-by-end",
        scored(
            (
                "loss_mask = completion_mask if",
                "completion_mask = completion_mask * (completion_ids != self._tokenizer.pad_token_id)\n"
                "    loss_mask = completion_mask if",
            )
        ),
    ),
    Fault(
        "tokens-after-the-end",
        "tiny",
        edited(
            GRPOTrainer,
            "_generate_single_turn",
            ("(sequence_indices <= eos_idx.unsqueeze(1)).int()", "torch.ones_like(sequence_indices)"),
        ),
    ),
    Fault(
        "first-token-doubled",
        "tiny",
        edited(
            GRPOTrainer,
            "_generate_single_turn",
            ("[torch.tensor(ids) for ids in", "[torch.tensor([*ids[:1], *ids]) for ids in"),
        ),
    ),
    Fault("mask-shifted", "tiny", loss((MASK, f"completion_mask = completion_mask.roll(1, dims=1)\n    {MASK}"))),
    Fault(
        "log-probs-of-the-same-position",
        "tiny",
        edited(
            GRPOTrainer,
            "_get_per_token_logps_and_entropies",
            ("outputs.log_probs[:, -logits_to_keep:]", "outputs.log_probs[:, -logits_to_keep:].roll(1, dims=1)"),
        ),
    ),
    Fault("prompt-cut-on-the-left", "tiny", prompts(lambda self, ids: [one[4:] for one in ids])),
    Fault("prompt-without-special-tokens", "tiny", prompts(without_special)),
    Fault(
        "control-tokens-in-content",
        "tiny",
        rows(lambda found: [with_content(row, f"{row['prompt'][-1]['content']}<|end|>") for row in found]),
    ),
    Fault("template-options-ignored", "terse", template_with_option),
    Fault("text-cut-tokens-kept", "tiny", asked(cut_texts)),
)
"""By area, in the order of ``megarl exam --list``."""
