"""What is tried: tiny models of every family, trainer grids and engines that they fit, drawn without rejection."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields
from math import gcd, lcm
from typing import Any

from hypothesis import strategies as st

Config = dict[str, Any]
FAMILIES = "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"
MOE_FAMILIES = "mixtral", "qwen3_moe", "deepseek_v3"
UNTOLD = (
    *(
        "model_type",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "sliding_window",
        "norm_topk_prob",
        "n_group",
    ),
    *("topk_group", "num_experts_per_tok", "routed_scaling_factor", "topk_method", "scoring_func"),
)
"""Settings that decide nothing here, left out where a case is printed."""


def short(value: Any) -> str:
    """A dataclass in one line, without the fields that have their default."""
    told = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(told)})"


@dataclass(frozen=True, repr=False)
class Grid:
    """A Megatron grid; ranks in Megatron's default order tp-cp-ep-dp-pp, ``dp`` counts all data-parallel ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    __repr__ = short

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def settings(self) -> dict[str, int | None]:
        """The same as keyword arguments of megarl's MegatronGrid."""
        spelt = {"first": "first_stage_layers", "last": "last_stage_layers"}
        return {spelt.get(name, name): value for name, value in asdict(self).items()}


@dataclass(frozen=True, repr=False)
class Engine:
    """vLLM: ``replicas`` engines of tp x pp ranks each."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    replicas: int = 1
    __repr__ = short


@dataclass(frozen=True)
class HF:
    """Whole tensors under their HF names, on one rank."""


Side = Grid | Engine | HF


@dataclass(frozen=True)
class FamilyCase:
    """Weights of a model go from ``source`` to ``target``; ``te``: source / target use TransformerEngine's names;
    ``mtp``: with the layers for multi-token prediction."""

    config: Config
    source: Grid | HF
    target: Side
    te: tuple[bool, bool]
    mtp: bool = False

    def __repr__(self) -> str:
        model = " ".join(f"{k}={v}" for k, v in self.config.items() if k not in UNTOLD)
        names = [
            f" {side!r}{' TE' if te else ''}" for side, te in zip((self.source, self.target), self.te, strict=True)
        ]
        return f"{self.config['model_type']} [{model}]:{names[0]} ->{names[1]}{' mtp' if self.mtp else ''}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints a failing case: in one line too."""
        printer.text(repr(self))


# ------------------------------------------------------------------ models


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def qwen3_config(**changes: Any) -> Config:
    return {
        "model_type": "qwen3",
        "vocab_size": 70,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **changes,
    }


def has_experts(config: Config) -> bool:
    return config["model_type"] in MOE_FAMILIES


def fits_kv(kv: int, rows: int, grids: list[Grid], engines: list[Engine]) -> bool:
    """Key/value heads are split or shared evenly; Megatron also cuts all ``rows`` of the fused projection evenly."""
    shared = all(kv % t == 0 or t % kv == 0 for t in (side.tp for side in (*grids, *engines)))
    return shared and all(rows % grid.tp == 0 for grid in grids)


@st.composite
def models(draw: st.DrawFn, family: str, layers: int, grids: list[Grid], engines: list[Engine]) -> Config:
    """A config.json whose sizes divide as the grids and engines need."""
    small = st.integers(1, 2)
    every = lcm(*(side.tp for side in (*grids, *engines)))
    heads, head = every * (draw(small) if every < 8 else 1), draw(st.integers(1, 3))
    rows_per_kv = 2 * head  # the query's part always divides
    kv = draw(st.sampled_from([d for d in divisors(heads) if fits_kv(d, d * rows_per_kv, grids, engines)]))
    padded = [n for n in (64, 128, 192, 256) if all(n % engine.tp == 0 for engine in engines)]
    vocab = draw(st.sampled_from(padded)) - draw(st.integers(0, 63))
    config = qwen3_config(
        model_type=family,
        vocab_size=vocab,
        hidden_size=draw(st.integers(1, 5)),
        intermediate_size=every * draw(small),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        tie_word_embeddings=family != "deepseek_v3" and draw(st.booleans()),
        sliding_window=None,
    )
    if family in MOE_FAMILIES:
        config |= draw(expert_settings(family, layers, grids, engines, every))
    if family == "deepseek_v3":
        config |= draw(latent_settings(heads))
    return config


@st.composite
def expert_settings(
    draw: st.DrawFn, family: str, layers: int, grids: list[Grid], engines: list[Engine], every: int
) -> Config:
    most = max([e.tp for e in engines if e.expert_parallel or family == "qwen3_moe"], default=1)
    spread = lcm(*(grid.ep for grid in grids))
    # With expert parallelism vLLM also deals out a number of experts that it does not divide.
    experts = spread * draw(
        st.integers(-(-most // spread), max(-(-most // spread), 4 // spread) + (1 if most < 8 else 0))
    )
    split = lcm(*(g.etp or g.tp for g in grids), *(e.tp for e in engines if not e.expert_parallel))
    ffn = split * draw(st.integers(1, 2))
    if family == "mixtral":
        return {"num_local_experts": experts, "num_experts_per_tok": 2, "intermediate_size": ffn}
    if family == "qwen3_moe":
        return {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": ffn,
            "decoder_sparse_step": draw(st.integers(1, 2)) if layers > 1 else 1,
            "mlp_only_layers": draw(st.sampled_from([[], [layers - 1]])) if layers > 2 else [],
        }
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": lcm(ffn, every),
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


@st.composite
def latent_settings(draw: st.DrawFn, heads: int) -> Config:
    """Multi-head latent attention."""
    size = st.integers(1, 3)
    widths = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return {
        "num_key_value_heads": heads,
        "head_dim": None,
        "q_lora_rank": draw(st.sampled_from([3, 1, None])),
        **{width: draw(size) for width in widths},
    }


# ------------------------------------------------------------------ grids and engines


@functools.cache
def splits(layers: int, pp: int) -> list[dict[str, Any]]:
    """Every way in which Megatron deals ``layers`` out to ``pp`` stages, plain ones first."""
    found: list[dict[str, Any]] = []
    for vpp in (1, 2) if pp > 1 else (1,):
        for first in (None, *range(1, layers)) if pp > 1 else (None,):
            for last in (None, *range(1, layers)) if pp > 1 else (None,):
                rest, left = layers - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
                if rest < left or (rest if left == 0 else rest % left) or (vpp > 1 and left == 0):
                    continue
                sizes = [size for size in (first, last, rest // left if left else None) if size is not None]
                if all(size % vpp == 0 for size in sizes):
                    found.append({"pp": pp, "vpp": vpp, "first": first, "last": last})
    return found


@st.composite
def grids(draw: st.DrawFn, family: str, layers: int) -> Grid:
    stages = draw(st.sampled_from([pp for pp in (1, 2, 3, 4) if pp <= layers and splits(layers, pp)]))
    tp = draw(st.sampled_from([1, 2, 3, 4, 8] if stages < 3 else [1, 2, 4]))
    dp = draw(st.integers(1, 4 if tp * stages < 5 else 2))
    cp = draw(st.sampled_from([1, 1, 1, 2])) if tp * stages * dp < 9 else 1
    place = tp * cp * dp
    ep = draw(st.sampled_from([d for d in divisors(place) if d <= 8])) if family in MOE_FAMILIES else 1
    etp = draw(st.sampled_from([None, *divisors(place // ep)])) if family in MOE_FAMILIES else None
    if etp is None and place % (ep * (tp if ep == 1 else 1)):
        etp = 1
    ways = splits(layers, stages)
    interleaved = [way for way in ways if way["vpp"] > 1]
    if interleaved and draw(st.booleans()):
        ways = interleaved
    return Grid(tp=tp, dp=dp, cp=cp, ep=ep, etp=etp, **draw(st.sampled_from(ways)))


@st.composite
def engines(draw: st.DrawFn, family: str, layers: int) -> Engine:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8] if layers > 2 or family in MOE_FAMILIES else [1, 2, 4, 8, 16, 32]))
    pp = draw(st.integers(1, min(layers, 3) if tp < 8 else 1))
    expert_parallel = family in MOE_FAMILIES and draw(st.booleans())
    return Engine(tp, pp, expert_parallel, draw(st.integers(1, 2)) if tp < 8 else 1)


@st.composite
def family_cases(draw: st.DrawFn, family: str, kind: str) -> FamilyCase:
    """``kind``: "engine" is grid to vLLM, "grid" grid to grid, "hf" grid to HF, "load" HF to grid."""
    layers = draw(st.integers(1, 4 if family in MOE_FAMILIES else 6))
    source: Grid | HF = HF() if kind == "load" else draw(grids(family, layers))
    target: Side = (
        draw(engines(family, layers)) if kind == "engine" else HF() if kind == "hf" else draw(grids(family, layers))
    )
    te = kind != "load" and draw(st.booleans()), kind in ("grid", "load") and draw(st.booleans())
    used = [side for side in (source, target) if isinstance(side, Grid)]
    config = draw(models(family, layers, used, [target] if isinstance(target, Engine) else []))
    mtp = family == "deepseek_v3" and kind != "engine" and draw(st.booleans())
    if mtp:
        config |= {
            "num_nextn_predict_layers": draw(st.integers(1, 2)),
            "hidden_size": lcm(*(g.tp for g in used)) * draw(st.integers(1, 2)),
        }
    return FamilyCase(config, source, target, te, mtp)


# ------------------------------------------------------------------ plain cases: one family, no experts


@dataclass(frozen=True)
class Case:
    """A model with a plain trainer grid and an engine that it fits."""

    config: Config
    tp: int
    pp: int
    dp: int
    engine_tp: int
    replicas: int


def engine_sizes(config: Config) -> list[int]:
    heads, kv, ffn = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
    padded = -(-config["vocab_size"] // 64) * 64
    return [
        t for t in range(1, 9) if heads % t == 0 and ffn % t == 0 and padded % t == 0 and (kv % t == 0 or t % kv == 0)
    ]


@st.composite
def configs(draw: st.DrawFn, layers: int | None = None) -> Config:
    kv = draw(st.sampled_from([1, 2, 3, 4]))
    return qwen3_config(
        vocab_size=draw(st.integers(1, 200)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.sampled_from([8, 12, 24])),
        num_hidden_layers=layers or draw(st.integers(1, 4)),
        num_attention_heads=kv * draw(st.sampled_from([1, 2, 3, 4])),
        num_key_value_heads=kv,
        head_dim=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs())
    return Case(
        config,
        tp=draw(st.sampled_from(divisors(gcd(config["num_key_value_heads"], config["intermediate_size"])))),
        pp=draw(st.sampled_from(divisors(config["num_hidden_layers"]))),
        dp=draw(st.integers(1, 2)),
        engine_tp=draw(st.sampled_from(engine_sizes(config))),
        replicas=draw(st.integers(1, 2)),
    )
