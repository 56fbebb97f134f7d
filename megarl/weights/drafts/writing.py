"""Make a draft of a family's table; format it as a source file and as a report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import blocks
from megarl.weights.architectures.megatron_config import transformer_kwargs
from megarl.weights.architectures.table import Fused, JoinedTensor, Logical, Param, RouterRules, Shard, Stage, rotates
from megarl.weights.drafts.key_changes import arguments, logits_of, passed_over
from megarl.weights.drafts.matches import JOINED_GROUPS, Draft, draft_of
from megarl.weights.drafts.probes import ModelFacts, facts_of, norm_places, normalises
from megarl.weights.drafts.tiny import SMALL, SMALL_TOWER, TOKENS, flat, stored_tensors, tiny_model

_TABLE = (
    *("BaseNames", "Fused", "JoinedTensor", "LayerRules", "Logical", "MultiplierKeys", "NormRules", "Op", "Param"),
    *("RouterRules", "Shard", "Stage"),
)
"""Names of ``table`` that a source may need."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Value of ``hidden_act`` in config.json -> Megatron's ``activation``, where it is not SwiGLU's."""

_QUESTIONS = {
    "PAIRED_EXPERTS": "whether rows of gate and up alternate, the activation, and gated_linear_unit in megatron=",
    "OUT_BIAS": "which linear layers have biases, and add_bias_linear in megatron=",
}
"""Group of ``blocks`` -> fact that its rows take for granted."""


def drafted(name: str, config: dict[str, Any], names: Collection[str] = ()) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft of a family, and configuration changes that it would ignore.

    Args:
        config: Configuration of the tiny model.
        names: Names of the tensors in the family's files, as in tables.
    """
    from transformers.utils import logging as messages

    messages.set_verbosity_error()  # silences errors about tried values
    messages.disable_progress_bar()
    model = tiny_model(config)
    draft = draft_of(name, stored_tensors(model, names), flat(config), norm_places(model, config))
    if draft.refused:
        return draft, []
    learn(draft, model, config)
    arch = draft.architecture()
    try:
        _, found = passed_over(config, logits_of(model, config), lambda changed: arguments(arch, flat(changed)))
    except ArchitectureError as error:
        draft.refused = str(error)
        return draft, []
    present = set(model.state_dict())
    single = {
        key
        for key, value in config.items()
        if isinstance(value, bool) and _tensors({**config, key: not value}) != present
    }
    single |= {key for change in found if len(change) == 1 for key in change if key in flat(config)}
    fixed = sorted(key for key in single - set(SMALL) if not isinstance(flat(config)[key], dict | list))
    draft.fixed |= {key: flat(config)[key] for key in fixed}
    return draft, [change for change in found if not set(change) <= set(draft.fixed)]


def learn(draft: Draft, model: Any, config: dict[str, Any]) -> None:
    """Add to a draft what the logits of its tiny model show, and a question for each fact that they do not.

    Args:
        model: The tiny model with ``config``.
    """
    base, facts = flat(config), facts_of(model, config)
    if facts.zero_centred is None:
        draft.questions.append("what norms compute: they are no RMSNorm by weight or by 1 + weight")
    draft.norms = replace(draft.norms, zero_centred=bool(facts.zero_centred))
    if facts.embedding_root:
        draft.multipliers = replace(draft.multipliers, embedding_root="hidden_size")
    names = {row.megatron for row in draft.rows()}
    if "mlp.router.weight" in names:
        _learn_router(draft, facts, config)
    if facts.neighbours and not base.get("kv_lora_rank"):
        draft.megatron["rotary_interleaved"] = True
    elif facts.neighbours and "rope_interleave" not in base:
        draft.fixed["rope_interleave"] = True
    elif facts.neighbours is None:
        draft.questions.append("which dimensions of a head the rotary embedding turns together")
    _learn_rotation(draft, facts, base)
    _compare_scales(draft, facts, base)
    activation = base.get("hidden_act") or base.get("hidden_activation")
    if activation in _ACTIVATIONS:
        draft.megatron["activation"] = _ACTIVATIONS[activation]
    if "mlp.shared_experts.gate_weight" in names:
        draft.megatron["moe_shared_expert_gate"] = True
    draft.questions += [question for group, question in _QUESTIONS.items() if group in draft.groups]
    joined = [one for one in draft.joined if len(one.parts) > 1]
    draft.questions += [f"the order in {one.name}: {', '.join(one.parts)}" for one in joined]
    if any(part.dtype for row in draft.rows() for part in row.hf):
        draft.questions.append("whether the router's bias is float32 in the files and in vLLM, as the rows say")
    draft.questions.append(
        "vLLM's names of tensors: the draft has usual ones; a family without a class in vLLM has transformers' modules"
    )


def _learn_router(draft: Draft, facts: ModelFacts, config: dict[str, Any]) -> None:
    base, key, normalised = flat(config), "norm_topk_prob", facts.normalised
    sigmoid = bool(facts.no_softmax) and any(row.megatron == "mlp.router.expert_bias" for row in draft.rows())
    if normalised is None or sigmoid != facts.no_softmax:
        draft.questions.append("how the router scores experts, and whether it divides their weights by the sum")
    scaled = base.get("routed_scaling_factor") is not None
    always = bool(normalised)
    if key in base and normalised is not None and normalises(config, key, not base[key]) != normalised:
        always = False  # the key decides
    elif key in base and not normalised:
        draft.fixed[key] = False
    draft.router = RouterRules(
        sigmoid=sigmoid, norms_topk=always, unscaled=sigmoid and not scaled, scales_topk=scaled and not sigmoid
    )


def _compare_scales(draft: Draft, facts: ModelFacts, base: Mapping[str, Any]) -> None:
    """Ask about a factor of attention scores that the draft does not know."""
    try:
        values = transformer_kwargs(draft.architecture(), base)
    except ArchitectureError:
        return
    known = values.get("softmax_scale", values["kv_channels"] ** -0.5)
    other = [scale for scale in facts.scales if abs(scale - known) > 1e-6]
    if other and not values["mla"]:
        draft.questions.append(f"attention scores: transformers multiplies them by {other}, the draft by {known}")


def _learn_rotation(draft: Draft, facts: ModelFacts, base: Mapping[str, Any]) -> None:
    """Choose the rule of layers without a rotary embedding that agrees with the logits."""
    if facts.rotating is None:
        return
    layers = (draft.layers, replace(draft.layers, rope_in_windows=True))
    for rule in layers:
        draft.layers = rule
        try:
            if tuple(rotates(draft.architecture(), base, len(facts.rotating))) == facts.rotating:
                return
        except ArchitectureError:
            continue
    draft.layers = layers[0]
    still = [number for number, turns in enumerate(facts.rotating) if not turns]
    draft.questions.append(f"which key says that layers {still} have no rotary embedding")


def _tensors(config: dict[str, Any]) -> set[str] | None:
    """Tensor names of a configuration's model; ``None`` if transformers refuses it."""
    try:
        return set(tiny_model(config).state_dict())
    except ArchitectureError:
        return None


def source(draft: Draft) -> str:
    """Return the source file of a draft: a table in the form of ``megarl/weights/architectures``."""
    shared = {id(part) for rows in draft.groups.values() for row in rows for part in row.hf}
    fused = {name: rows for name, rows in draft.vllm.items() if all(id(p) in shared for row in rows for p in row.hf)}
    own_fused = [row for name, rows in draft.vllm.items() if name not in fused for row in rows] + draft.vllm_own
    joined = {name: rows for name, rows in JOINED_GROUPS.items() if {*rows} <= {*draft.joined}}
    own_joined = [one for one in draft.joined if not any(one in rows for rows in joined.values())]
    rows = [f"        *{name}," for name in draft.groups]
    logicals: dict[int, str] = {}
    lines = []
    for origin, own in draft.borrowed.items():
        for row in own:
            for part in row.hf:
                if id(part) not in logicals:
                    logicals[id(part)] = f"_T{len(logicals)}"
                    lines.append(f"{logicals[id(part)]} = {_logical(part)}")
            rows.append(f"        {_param(row, logicals)},  # {origin}")
    arch = draft.architecture()
    kinds = "layers", "norms", "router", "multipliers", "base_names"
    rules = {name: call for name in kinds if (call := _call(getattr(arch, name)))}
    own_rows = [f"        {_fused(row, logicals)}," for row in own_fused if {*map(id, row.hf)} <= logicals.keys()]
    used = "\n".join([*rows, *lines, *own_rows, *map(_call, own_joined), *rules.values()])
    table = [name for name in _TABLE if f"{name}(" in used or f"{name}." in used]
    single = [name if isinstance(getattr(blocks, name), JoinedTensor) else f"*{name}" for name in joined]
    imported = sorted({name.partition("[")[0] for name in (*draft.groups, *fused, *joined)})
    return "\n".join(
        [
            f'"""{draft.name}: a draft by ``megarl add-model``.',
            "",
            f"Source: ``transformers/models/{draft.name}/modeling_{draft.name}.py``.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from megarl.weights.architectures.blocks import (",
            *(f"    {name}," for name in imported),
            ")",
            f"from megarl.weights.architectures.table import {', '.join(['Architecture', *table])}",
            "",
            *(f"# no row: {name} {shape}" for name, shape in draft.unplaced.items()),
            *(f"# not in the model: {name}" for name in draft.missing),
            *(f"# check {question}" for question in draft.questions),
            *lines,
            "",
            f"{draft.name.upper()} = Architecture(",
            f'    name="{draft.name}",',
            f'    models="{draft.name}",  # names of published models',
            "    params=(",
            *rows,
            "    ),",
            "    vllm=(",
            *(f"        *{name}," for name in fused),
            *own_rows,
            "    ),",
            *(["    joined=("] if draft.joined else []),
            *(f"        {name}," for name in (*single, *map(_call, own_joined))),
            *(["    ),"] if draft.joined else []),
            *(f"    {name}={call}," for name, call in rules.items()),
            *([f"    keys={draft.keys!r},"] if draft.keys else []),
            *([f"    megatron={draft.megatron!r},"] if draft.megatron else []),
            *([f"    vllm_text={arch.vllm_text!r},"] if arch.vllm_text else []),
            f"    fixed={draft.fixed!r},",
            ")",
            "",
        ]
    )


def _call(rule: Any) -> str:
    """Constructor call with the non-default values; "" if all are defaults."""
    given = [f"{one.name}={value!r}" for one in fields(rule) if (value := getattr(rule, one.name)) != one.default]
    return f"{type(rule).__name__}({', '.join(given)})" if given else ""


def _logical(part: Logical) -> str:
    shard = "" if part.shard is Shard.REPLICATED else f", Shard.{part.shard.name}"
    dtype = "" if part.dtype is None else f", dtype={part.dtype!r}"
    return f'Logical("{part.name}", "{part.axes}"{shard}{dtype})'


def _param(row: Param, logicals: Mapping[int, str]) -> str:
    parts = "".join(f"{logicals[id(part)]}, " for part in row.hf).rstrip()
    stage = "" if row.stage is Stage.LAYER else f", Stage.{row.stage.name}"
    te = "" if row.te is None else f', te="{row.te}"'
    keys = f", keys={row.keys!r}" if row.keys else ""
    return f'Param("{row.megatron}", Op.{row.op.name}, ({parts}){stage}{te}{keys})'


def _fused(row: Fused, logicals: Mapping[int, str]) -> str:
    parts = "".join(f"{logicals[id(part)]}, " for part in row.hf).rstrip()
    shard = "" if row.shard is None else f", Shard.{row.shard.name}"
    return f'Fused("{row.vllm}", Op.{row.op.name}, ({parts}){shard})'


def report(draft: Draft, config: Mapping[str, Any], unread: list[dict[str, Any]], beside: list[str]) -> Iterator[str]:
    """Yield lines with the rows found, the tensors not placed, and the next steps.

    Args:
        unread: Changes of config.json that change transformers' logits but are ignored by the draft.
        beside: Names in the checkpoint's files that transformers does not read.
    """
    yield f"rows of blocks.py: {', '.join(draft.groups) or 'none'}"
    for origin, rows in draft.borrowed.items():
        yield f"rows, {origin}: {', '.join(row.megatron for row in rows)}"
    yield from (f"NO ROW for {name} {shape}" for name, shape in draft.unplaced.items())
    yield from (f"NO ROW for {name}, which transformers does not read" for name in beside)
    yield from (f"NOT IN THE MODEL: {name}, which the rows expect" for name in draft.missing)
    yield from (f"CHECK {question}" for question in draft.questions)
    if draft.refused:
        yield f"REFUSED: {draft.refused}"
    for key, value in draft.fixed.items():
        yield f"fixed: {key}={value!r} changes what transformers computes and no rule reads it; name a rule, or keep it"
    for change in unread:
        yield f"NOT READ: {change} changes what transformers computes; refuse it or read it"
    yield "Names that fit prove nothing: the tests compare what is computed."
    yield "next: put the file into megarl/weights/architectures/ and its row into ARCHITECTURES there;"
    yield "add this row to FAMILIES in tests/parallel/families.py, and its name to ALIKE there:"
    yield f'    "{draft.name}": ("{draft.name}", {_small_keys(config)!r}),'
    yield (
        f"then run: pytest tests/parallel/test_families.py tests/unit/test_config_keys.py -k {draft.name} "
        "(docs/adding_a_model.md)"
    )


def _small_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a tiny configuration that are not the class's defaults, as far as ``tiny`` sets them."""
    known = {*SMALL, *SMALL_TOWER, *TOKENS}
    found = {key: value for key, value in config.items() if key in known or isinstance(value, list)}
    parts = {key: config[key] for key in ("text_config", "vision_config") if isinstance(config.get(key), Mapping)}
    return found | {key: _small_keys(part) for key, part in parts.items()}
