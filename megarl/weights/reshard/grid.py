"""Megatron's grid of ranks, and the model layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from megarl.config.schema import GridSizes
from megarl.core.errors import ConfigError
from megarl.weights.architectures.table import ModelSizes
from megarl.weights.reshard.layout import Owners


@dataclass(frozen=True)
class MegatronGrid(GridSizes):
    """Rank order is Megatron's default ``tp-cp-ep-dp-pp``: rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp *
    pp_rank)).

    Experts have a separate grid inside each pipeline stage: rank in stage = etp_rank + etp * (ep_rank + ep *
    expert_dp_rank).
    """

    def check(self, setting: str = "parallel") -> None:
        """Raise ConfigError if these sizes are invalid for any model.

        ``setting``: the settings section of these sizes, for the error.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"{setting}.{field.name}={value} is not a positive number; set {setting}.{field.name} to 1 or more"
                )
        if self.stage_size % (self.ep * self.expert_tp):
            raise ConfigError(
                f"{setting}.ep={self.ep} * {setting}.etp={self.expert_tp} does not divide the {self.stage_size} ranks "
                f"of a pipeline stage of {self}; set {setting}.etp to 1 and {setting}.ep to a divisor of "
                f"{self.stage_size}, or change {setting}.dp"
            )
        ends = [key for key in ("first_stage_layers", "last_stage_layers") if getattr(self, key) is not None]
        for key in [*ends, "vpp"] if self.vpp > 1 else ends:
            if self.pp == 1:
                raise ConfigError(
                    f"{setting}.{key}={getattr(self, key)} needs {setting}.pp above 1; set {setting}.pp to 2 or more, "
                    f"or leave {setting}.{key} out"
                )
        if self.vpp > 1 and self.pp == len(ends) == 2:
            raise ConfigError(
                f"{setting}.vpp={self.vpp} with both {setting}.first_stage_layers={self.first_stage_layers} and "
                f"{setting}.last_stage_layers={self.last_stage_layers} leaves {setting}.pp=2 no stage between, which "
                "Megatron-Core cannot interleave; give one of the two"
            )

    def __str__(self) -> str:
        text = f"tp={self.tp} pp={self.pp} dp={self.dp}"
        more = {"ep": self.ep, "cp": self.cp, "vpp": self.vpp}
        text += "".join(f" {key}={value}" for key, value in more.items() if value > 1)
        if self.expert_tp != self.tp:
            text += f" etp={self.expert_tp}"
        for key in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, key) is not None:
                text += f" {key}={getattr(self, key)}"
        return text

    @cached_property
    def _stages(self) -> tuple[range, ...]:
        return tuple(range(p * self.stage_size, (p + 1) * self.stage_size) for p in range(self.pp))

    def dense(self, stage: int) -> Owners:
        """Owners of the shares of tensor-parallel weights."""
        ranks = self._stages[stage]
        return Owners(tuple(tuple(ranks[t :: self.tp]) for t in range(self.tp)))

    def whole(self, stage: int) -> Owners:
        return Owners((tuple(self._stages[stage]),))

    def experts(self, stage: int, ep_rank: int) -> Owners:
        """Owners of the shares of one expert-parallel rank's experts."""
        etp, ranks = self.expert_tp, self._stages[stage]
        return Owners(
            tuple(
                tuple(ranks[i] for i in range(len(ranks)) if i % etp == k and i // etp % self.ep == ep_rank)
                for k in range(etp)
            )
        )

    def layers(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """Global layers of every (pipeline stage, model chunk): Megatron's ``get_transformer_layer_offset``."""
        per_stage = self._layers_per_stage(num_layers)
        per_chunk = [n // self.vpp for n in per_stage]
        turn = sum(per_chunk)
        return tuple(
            tuple(range(v * turn + sum(per_chunk[:p]), v * turn + sum(per_chunk[: p + 1])) for v in range(self.vpp))
            for p in range(self.pp)
        )

    def _layers_per_stage(self, num_layers: int) -> list[int]:
        ends = [n for n in (self.first_stage_layers, self.last_stage_layers) if n is not None]
        middle = self.pp - len(ends)
        each = (num_layers - sum(ends)) // middle if middle > 0 else 0
        stages = [each] * self.pp
        if self.first_stage_layers is not None:
            stages[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            stages[-1] = self.last_stage_layers
        return stages


def divisors(*values: int) -> str:
    """Format the common divisors of all values, for the fix in an error."""
    fits = [str(n) for n in range(1, min(values) + 1) if all(v % n == 0 for v in values)]
    return fits[0] if len(fits) == 1 else f"{', '.join(fits[:-1])} or {fits[-1]}"


def check_grid(name: str, sizes: ModelSizes, grid: MegatronGrid, setting: str = "parallel") -> None:
    """Raise ConfigError if the sizes form no grid, or one that does not divide the model.

    ``setting``: as in ``MegatronGrid.check``.
    """
    grid.check(setting)
    _check_tp(name, sizes, grid, setting)
    _check_experts(name, sizes, grid, setting)
    _check_pp(name, sizes.num_layers, grid, setting)
    _check_handed(name, sizes, grid, setting)
    _check_deepstack(name, sizes, grid, setting)


def _check_tp(name: str, sizes: ModelSizes, grid: MegatronGrid, setting: str) -> None:
    rules = [("num_attention_heads", sizes.heads)]
    if not sizes.kv_lora:
        rules.append(("the rows of the joint query/key/value matrix", sizes.q + 2 * sizes.kv))
    if sizes.global_layers:
        joint, copies = ("query/key", 1) if sizes.keys_are_values else ("global query/key/value", 2)
        rules.append((f"the rows of the joint {joint} matrix", sizes.global_q + copies * sizes.global_kv))
    if len(sizes.moe_layers) < sizes.num_layers:
        rules.append(("intermediate_size", sizes.ffn))
    if sizes.shared_ffn:
        rules.append(("the width of the shared experts", sizes.shared_ffn))
    rules += recurrent_rules(sizes)
    groups = {"num_key_value_heads": 0 if sizes.kv_lora else sizes.kv_heads}
    groups["num_global_key_value_heads"] = sizes.global_kv_heads
    fits = [
        n
        for n in range(1, sizes.heads + 1)
        if all(v % n == 0 for _, v in rules) and all(shares_heads(number, n) for number in groups.values())
    ]
    fix = f"set {setting}.tp to one of {fits}"
    for key, value in rules:
        if value % grid.tp:
            raise ConfigError(f"{setting}.tp={grid.tp} does not divide {key}={value} of {name}; {fix}")
    for key, number in groups.items():
        if not shares_heads(number, grid.tp):
            raise ConfigError(
                f"{setting}.tp={grid.tp} neither divides nor is a multiple of {key}={number} of {name}; {fix}"
            )


def recurrent_rules(sizes: ModelSizes) -> list[tuple[str, int]]:
    """Return (key, number) of a gated delta net's heads, or of a short convolution's channels, which tensor-parallel
    ranks share; none for other models."""
    heads = [("linear_num_key_heads", sizes.delta_key_heads), ("linear_num_value_heads", sizes.delta_heads)]
    channels = [("hidden_size", sizes.hidden)] if sizes.convolution_layers else []
    return heads if sizes.delta_layers else channels


def shares_heads(kv_heads: int, ways: int) -> bool:
    """True if key/value heads (0: none) can be split over ``ways`` ranks, or each replicated on several ranks."""
    return not kv_heads or kv_heads % ways == 0 or ways % kv_heads == 0


def _check_experts(name: str, sizes: ModelSizes, grid: MegatronGrid, setting: str) -> None:
    if not sizes.experts:
        if grid.ep > 1:
            raise ConfigError(f"{setting}.ep={grid.ep}, but {name} has no experts; set {setting}.ep to 1")
        return
    if sizes.experts % grid.ep:
        raise ConfigError(
            f"{setting}.ep={grid.ep} does not divide the {sizes.experts} experts of {name}; set {setting}.ep to "
            f"{divisors(sizes.experts)}"
        )
    if sizes.expert_ffn % grid.expert_tp:
        raise ConfigError(
            f"{setting}.etp={grid.expert_tp} does not divide the experts' width {sizes.expert_ffn} of {name}; set "
            f"{setting}.etp to {divisors(sizes.expert_ffn)}"
        )


def _check_pp(name: str, num_layers: int, grid: MegatronGrid, setting: str) -> None:
    stages = grid._layers_per_stage(num_layers)
    uneven = grid.first_stage_layers is not None or grid.last_stage_layers is not None
    if sum(stages) != num_layers or min(stages) < 1:
        fix = (
            f"set {setting}.first_stage_layers and {setting}.last_stage_layers so that the other stages share the rest "
            "evenly"
            if uneven
            else f"set {setting}.pp to {divisors(num_layers)}, or give the first or last stage another number of "
            "layers "
            f"({setting}.first_stage_layers, {setting}.last_stage_layers)"
        )
        raise ConfigError(f"{setting}.pp={grid.pp} does not divide num_hidden_layers={num_layers} of {name}; {fix}")
    if any(n % grid.vpp for n in stages):
        raise ConfigError(
            f"{setting}.vpp={grid.vpp} does not divide the layers of each stage of {name}, {stages}; set {setting}.vpp "
            f"to {divisors(*stages)}"
        )


def _check_handed(name: str, sizes: ModelSizes, grid: MegatronGrid, setting: str) -> None:
    """Raise ConfigError if layers take tensors of another stage: keys and values, or inputs of single layers."""
    for key, value in (("pp", grid.pp), ("cp", grid.cp)):
        if value > 1 and sizes.hands_on:
            raise ConfigError(
                f"{setting}.{key}={value} with {name}: its layers take keys and values of earlier ones, or inputs of "
                f"their own, which is tested on one stage with whole sequences; set {setting}.{key} to 1"
            )


def _check_deepstack(name: str, sizes: ModelSizes, grid: MegatronGrid, setting: str) -> None:
    """Raise ConfigError if a layer that adds vectors of images is not beside the tower, which computes them."""
    first = len(grid.layers(sizes.num_layers)[0][0])
    if first >= sizes.deepstack:
        return
    if grid.vpp > 1:
        key, value, fix = "vpp", grid.vpp, "a smaller number"
    elif grid.first_stage_layers is not None:
        key, value, fix = "first_stage_layers", first, f"{sizes.deepstack} or more"
    else:
        key, value, fix = "pp", grid.pp, f"{sizes.num_layers // sizes.deepstack} or less"
    raise ConfigError(
        f"{setting}.{key}={value} leaves {first} layers beside the vision tower of {name}, and the first "
        f"{sizes.deepstack} layers add its vectors to their outputs; set {setting}.{key} to {fix}"
    )
