"""Every file of configs/ through the schema, and every experiment for a real model against that model's published
config.json.

Settings and plans only: the weights files are headers with holes after them. What is changed for the check is named in
``CPU``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from megarl.config import Config, compose, config_dir
from megarl.config.schema import FromScratchConfig, ParallelConfig, RolloutConfig, VisionTowerConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import check_parallel, megatron_grid, role_grids
from megarl.run.launch.starter import KINDS as STARTERS
from megarl.run.nodes.plan import NodeInfo, groups_of, idle_gpus, plan_job
from megarl.weights.architectures import Head, architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.reshard.layout import Layout, volume
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from megarl.weights.reshard.plan import build_plan

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "experiments.md").read_text()
MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "cases" / "hf_configs.json").read_text())
"""Values of the published config.json files, and the number of parameters that is published with them."""
NODES = {
    "grpo_qwen2_5_7b": 1,
    "grpo_qwen3_8b": 1,
    "grpo_qwen2_5_vl_7b": 1,
    "grpo_qwen3_vl_8b": 1,
    "grpo_qwen3_5_27b": 2,
    "grpo_qwen3_5_35b_a3b": 2,
    "mix_qwen2_5_7b": 1,
    "dpo_llama3_1_8b": 1,
    "ppo_llama3_1_8b": 1,
    "grpo_qwen3_30b_a3b": 2,
    "grpo_gemma3_12b": 1,
    "grpo_gpt_oss_20b": 1,
    "grpo_olmo3_7b": 2,
    "gspo_glm4_5_air": 8,
    "gspo_qwen3_235b_a22b": 16,
    "grpo_qwen2_5_32b": 8,
    "grpo_deepseek_v3": 128,
}
LARGE = ("grpo_qwen3_30b_a3b", "grpo_qwen3_5_35b_a3b", "gspo_glm4_5_air", "gspo_qwen3_235b_a22b", "grpo_deepseek_v3")
"""Thousands of experts' tensors: to plan everything takes seconds, so two engine ranks are planned."""
TOYS = (
    "quickstart",
    "lora",
    "own",
    "own_gpu",
    "sft",
    "dpo",
    "reward_model",
    "guess",
    "vision",
    "distill",
    "families",
    "distill_two",
)
YOURS = ("model.path=/m", "taskset.train=a.parquet", "taskset.eval=b.parquet")
CPU = (
    "parallel.backend=gloo",
    "model.transformer_impl=local",
    "model.fusions=[]",
    "rollout.gpu_memory_utilization=null",
    "rollout.kv_cache_bytes=1048576",
    "sync.transport=gloo",
    "cluster.device_bytes=null",
)
GB = 1e9
GPU_GB = 80.0


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


@cache
def trainer_layout(path: str, grid: MegatronGrid, head: Head = "lm") -> Layout:
    return megatron_layout(hf_config(path), grid, transformer_impl="transformer_engine", head=head)


@cache
def engine_layout(path: str, rollout: RolloutConfig) -> Layout:
    """Of one of its engines; they are all alike."""
    return vllm_layout(hf_config(path), rollout.tp, pp=rollout.pp, expert_parallel=rollout.expert_parallel)


def hf_config(path: str | None) -> dict[str, Any]:
    return complete(published_config(path))


def published_config(path: str | None) -> dict[str, Any]:
    """As it is in ``config.json``, with keys left out."""
    name = Path(str(path)).name
    if name == "Llama-3.1-8B-RM":
        base = MODELS["Llama-3.1-8B-Instruct"]["config"]
        return {**base, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    return dict(MODELS[name]["config"])


@cache
def experiment(name: str) -> Config:
    """A file of configs/experiment as it is. To compose it takes a tenth of a second, and many tests look at it."""
    return compose([f"experiment={name}"])


# ------------------------------------------------------------------ every file


def test_every_file_is_loaded_by_a_test() -> None:
    """A new group is one that ``test_every_choice_composes`` finds; an experiment is a toy or has a row in
    ``NODES``."""
    assert set(names("experiment")) == set(NODES) | set(TOYS)
    shared = {path.stem for path in (config_dir() / "experiment" / "base").glob("*.yaml")}
    used = {
        word
        for name in NODES
        for word in re.findall(r"- base/(\w+)", (config_dir() / f"experiment/{name}.yaml").read_text())
    }
    assert shared == used
    deep = [path for path in config_dir().rglob("*.yaml") if len(path.relative_to(config_dir()).parts) > 2]
    assert {path.parent for path in deep} == {config_dir() / "experiment" / "base"}


def choices() -> Iterator[list[str]]:
    """Each file of each group beside the quickstart at least once; those of several groups share a composition."""
    groups = {
        path.name: names(path.name)
        for path in sorted(config_dir().iterdir())
        if path.is_dir() and path.name != "experiment"
    }
    for row in itertools.zip_longest(*([f"{group}={name}" for name in found] for group, found in groups.items())):
        yield [choice for choice in row if choice is not None]


@pytest.mark.parametrize("chosen", choices(), ids=" ".join)
def test_every_choice_composes_with_the_quickstart(chosen: list[str]) -> None:
    from megarl.run.checks.settings import check_algorithm

    config = compose(["experiment=quickstart", *chosen])
    check_parallel(config.parallel)
    check_algorithm(config)


@pytest.mark.parametrize("name", ["cispo", "grpo_r1", "ppo"])
def test_algorithms_compose_with_ones_own_experiment(name: str) -> None:
    compose(["experiment=own", f"algorithm={name}", *YOURS])


# ------------------------------------------------------------------ published models


@pytest.mark.parametrize("name", MODELS)
def test_tables_count_the_published_parameters(name: str) -> None:
    config, published = complete(MODELS[name]["config"]), MODELS[name]["parameters"]
    assert sum(math.prod(shape) for shape in architecture(config).tensors(config).values()) == published


# ------------------------------------------------------------------ static memory


class Memory(NamedTuple):
    """Bytes on the fullest GPU of either kind: docs/experiments.md has the formula."""

    trainer: float
    engine: float


def parameters(layout: Layout, rank: int) -> tuple[int, int, int]:
    """(parameters that most ranks share alike, those of experts, of a vision tower) on a rank, padding included."""
    dense = experts = tower = 0
    for row, share in layout.rows_of(rank):
        size = math.prod(row.local_shape(share)[len(row.stack) :])
        if ".experts." in row.parts[0]:
            experts += size
        elif row.parts[0].startswith("visual."):
            tower += size
        else:
            dense += size
    return dense, experts, tower


def static_bytes(layout: Layout, grid: ParallelConfig, rank: int, *, learns: bool) -> float:
    """No job of these trains its tower."""
    dense, experts, tower = parameters(layout, rank)
    if not learns:
        return 2.0 * (dense + experts + tower)
    copies, expert_copies = grid.dp * grid.cp, grid.stage_size // (grid.ep * grid.expert_tp)
    return 2.0 * tower + 6.0 * (dense + experts) + 12.0 * (dense / copies + experts / expert_copies)


def memory_of(config: Config) -> Memory:
    from megarl.learn.parallel.grid import roles_of

    algorithm = algorithms.get(config.algorithm.name)
    roles = roles_of(config, algorithm)
    grids = role_grids(config, roles)
    paths = {"critic": config.critic.path, "reward_model": config.reward_model.path}
    per_rank = [0.0] * config.parallel.world_size
    for setting, grid in grids.items():
        role = setting.removesuffix(".parallel")
        layout = trainer_layout(
            paths.get(role) or config.model.path, megatron_grid(grid), "score" if role in paths else "lm"
        )
        for stage in range(grid.pp):  # its ranks hold as much each: heads, rows and experts divide
            first = stage * grid.stage_size
            size = static_bytes(layout, grid, first, learns=role in ("parallel", "critic"))
            for rank in range(first, first + grid.stage_size):
                per_rank[rank] += size
    engine = 0.0
    if not algorithm.offline:
        engines = engine_layout(config.model.path, config.rollout)
        fullest = max(
            sum(parameters(engines, rank)) for rank in (0, engines.num_ranks - 1)
        )  # the first has experts that are left over
        engine = 2.0 * fullest
    return Memory(max(per_rank), engine)


def gpus(config: Config) -> tuple[int, int]:
    """Of the trainer and of the engines."""
    offline = algorithms.get(config.algorithm.name).offline
    return config.parallel.world_size, 0 if offline else config.rollout.replicas * config.rollout.tp * config.rollout.pp


def check_job(config: Config, nodes: int) -> Memory:
    """What the project's own checks do not know: GPUs, their memory, even batches. Raises ConfigError."""
    needed = max(gpus(config)) if config.rollout.placement == "colocated" else sum(gpus(config))
    if needed != 8 * nodes:
        raise ConfigError(f"{gpus(config)} GPUs are not {nodes} nodes of 8")
    rows = config.trainer.tasks_per_step * (
        1 if algorithms.get(config.algorithm.name).offline else config.algorithm.group_size
    )
    if rows % (config.trainer.updates_per_step * config.parallel.dp):
        raise ConfigError(
            f"{rows} rows a step do not divide by {config.trainer.updates_per_step} updates and dp={config.parallel.dp}"
        )
    memory = memory_of(config)
    share = config.rollout.gpu_memory_utilization
    assert share is not None, "engines' caches take what their weights leave"
    if memory.trainer > GPU_GB * GB or memory.engine > share * GPU_GB * GB:
        raise ConfigError(
            f"{memory.trainer / GB:.1f} GB on a trainer rank and {memory.engine / GB:.1f} GB on an engine's do not fit"
        )
    return memory


def described(name: str, config: Config, nodes: int, memory: Memory) -> str:
    """The row of docs/experiments.md."""
    rollout = config.rollout
    trainer, engines = gpus(config)
    vllm = f"{rollout.replicas} × TP{rollout.tp}{' EP' if rollout.expert_parallel else ''}"
    grid = str(megatron_grid(config.parallel)).replace("pp=1 ", "").replace(" dp=1", "")
    gpu = f"{trainer} + {engines} = {nodes} × 8" if engines else f"{trainer} = {nodes} × 8"
    if config.rollout.placement == "colocated":
        gpu = f"{trainer} in turn = {nodes} × 8"
    engine = f"{vllm}, {memory.engine / GB:.1f}" if engines else "–"
    return f"| `{name}` | {config.algorithm.name} | {gpu} | {grid}, {memory.trainer / GB:.1f} | {engine} |"


@pytest.mark.parametrize("name", NODES)
def test_documented_job(name: str) -> None:
    config = experiment(name)
    memory = check_job(config, NODES[name])
    assert described(name, config, NODES[name], memory) in DOCS
    text = (config_dir() / "experiment" / f"{name}.yaml").read_text()
    assert "Never run on hardware" in " ".join(text.replace("#", "").split()), (
        "the file must say what is not known of it"
    )


@pytest.mark.parametrize("name", NODES)
def test_every_node_gets_eight_processes(name: str) -> None:
    """No GPU is idle, and no group spans nodes that it does not fill."""
    config, nodes = experiment(name), NODES[name]
    places = [NodeInfo(n, f"n{n}", "all", 8) for n in range(nodes)]
    plan = plan_job(config, places)
    assert not idle_gpus(plan, places)
    where = [rank.node for rank in plan.of(ProcessKind.TRAINER)]
    for group in groups_of(config):
        spans = {len(set(where[i : i + group.size])) for i in range(0, len(where), group.size)}
        assert spans == {max(1, group.size // 8)}, group
    with pytest.raises(ConfigError, match=r"need \d+ GPUs|would span nodes of 7 GPUs"):
        plan_job(config, [*places[:-1], places[-1]._replace(gpus=7)])


TURNS = [name for name in NODES if experiment(name).rollout.placement == "colocated"]


def variants(name: str) -> dict[str, list[str]]:
    """Overrides of the variants that the head of an experiment's file names, under the first words of each."""
    found: dict[str, list[str]] = {}
    for line in (config_dir() / f"experiment/{name}.yaml").read_text().splitlines():
        if line.startswith("#   ") and found:
            found[list(found)[-1]] += line.removeprefix("#   ").split()
        elif line.startswith(("# Conservative twin", "# One step ahead")):
            found[line[2:].rstrip(":")] = []
    return found


@pytest.mark.parametrize("name", TURNS)
def test_variants_of_a_preset_fit_their_nodes(in_workplace: Path, name: str) -> None:
    """Separate GPUs with recompute, and separate GPUs with rollouts a step ahead; labels have the nodes."""
    from megarl.run.checks.job import check

    twin, ahead = variants(name).items()
    for label, overrides in (twin, ahead):
        given = re.search(r"on (\d+) nodes", label)
        nodes = int(given[1]) if given else 1
        config = compose([f"experiment={name}", *overrides, *(["store=postgres"] if nodes > 1 else [])])
        assert config.rollout.placement == "separate"
        check_job(config, nodes)
        places = [NodeInfo(n, "", "all", 8) for n in range(nodes)]
        assert not idle_gpus(plan_job(config, places), places)
        if name in (
            "grpo_qwen2_5_7b",
            "ppo_llama3_1_8b",
        ):  # seconds each; the others differ in what this does not touch
            check(config, nodes=nodes, dry=True, elsewhere=True)
    assert compose([f"experiment={name}", *twin[1]]).model.recompute != "none"
    assert compose([f"experiment={name}", *ahead[1]]).sync.max_staleness == 1


def test_presets_of_one_node_take_turns_without_recompute() -> None:
    for name in NODES:
        config = experiment(name)
        if NODES[name] == 1 and not algorithms.get(config.algorithm.name).offline:
            assert name in TURNS and config.model.recompute == "none" and config.sync.max_staleness == 0


def test_memory_by_hand() -> None:
    """Qwen2.5-7B on TP2 DP4: 28 layers of two kv heads and 14 heads a rank, a half of the rest, norms whole."""
    layer = 3584 * (1792 + 2 * 256) + (1792 + 512) + 1792 * 3584 + 3 * 3584 * 9472 + 2 * 3584
    held = 28 * layer + 2 * 76032 * 3584 + 3584
    assert memory_of(experiment("grpo_qwen2_5_7b")).trainer == held * (2 + 4 + 12 / 4) + held * 2


# ------------------------------------------------------------------ the project's own check


PICTURES = [Image.new("RGB", (60, 90), color) for color in ("red", "blue")]
PUBLISHED: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("openai/gsm8k", "train"): [
        {"question": "2 clips and 3 clips are how many?", "answer": "2 + 3 = 5\n#### 1,005"},
        {"question": "Seen.", "answer": "#### 1"},
    ],
    ("openai/gsm8k", "test"): [{"question": "Seen. ", "answer": "x\n#### 1"}],
    ("DigitalLearningGmbH/MATH-lighteval", "train"): [
        {"problem": "Halve $1$.", "solution": "So $\\boxed{\\frac{1}{2}}$."}
    ],
    ("DigitalLearningGmbH/MATH-lighteval", "test"): [
        {"problem": "Add.", "solution": "$\\boxed{3}$"},
        {"problem": "None.", "solution": "?"},
    ],
    ("BytedTsinghua-SIA/DAPO-Math-17k", "train"): [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": text}],
            "ability": "MATH",
            "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
            "extra_info": {"index": "a"},
        }
        for text in ("Find x.", "Find x.", "Find y.", "find  Z.")
    ],
    ("BytedTsinghua-SIA/AIME-2024", "train"): [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "Find z."}],
            "ability": "MATH",
            "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "7"},
            "extra_info": {"index": 0},
        }
    ],
    **{
        ("HuggingFaceH4/ultrafeedback_binarized", split): [
            {
                "prompt": prompt,
                "prompt_id": "a",
                "score_chosen": 8.0,
                "score_rejected": 3.0,
                "messages": [],
                "chosen": [{"content": prompt, "role": "user"}, {"content": good, "role": "assistant"}],
                "rejected": [{"content": prompt, "role": "user"}, {"content": bad, "role": "assistant"}],
            }
            for prompt, good, bad in rows
        ]
        for split, rows in (
            ("train_prefs", [("Hi", "Hello", "No"), ("Same", "a", "a "), ("Held", "b", "c")]),
            ("test_prefs", [("Held", "b", "c")]),
        )
    },
    ("open-r1/OpenR1-Math-220k", "train"): [
        {
            "problem": "Add 1 and 1.",
            "answer": "2",
            "generations": ["<think>3</think>3", "<think>2</think>2"],
            "correctness_math_verify": [False, True],
        },
        {"problem": "Add.", "answer": "3", "generations": ["3"], "correctness_math_verify": [True]},
    ],
    **{
        ("hiyouga/geometry3k", split): [{"images": [picture], "problem": f"<image>{text}", "answer": "12"}]
        for split, text, picture in (("train", "Find x.", PICTURES[0]), ("test", "Find y.", PICTURES[1]))
    },
}
"""Rows with the published columns, made by hand: of every data set one row or two that is to be left out."""
MADE = {
    "data/gsm8k_math/train.parquet": 2,
    "data/gsm8k_math/test.parquet": 2,
    "data/dapo_math/train.parquet": 2,
    "data/dapo_math/aime_2024.parquet": 1,
    "data/ultrafeedback/train.parquet": 1,
    "data/ultrafeedback/test.parquet": 1,
    "data/openr1_math/expert.parquet": 1,
    "data/geometry3k/train.parquet": 1,
    "data/geometry3k/test.parquet": 1,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``data/`` as the commands of docs/experiments.md make it, and the models without their
    weights."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("workplace")
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda name, config=None, *, split: PUBLISHED[name, split]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "datasets", hub)
        for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
            exec(compile(block, "docs/experiments.md", "exec"), {})
    assert {str(p.relative_to(folder)): pq.read_metadata(p).num_rows for p in sorted(folder.rglob("*.parquet"))} == MADE
    for path in folder.rglob("*.parquet"):  # as many rows as a step takes
        rows = pq.read_table(path, partitioning=None)
        pq.write_table(pa.concat_tables([rows] * (1 if path.stem in ("test", "aime_2024") else 1024)), path)
    write_tokenizer(folder / "tokenizer", FromScratchConfig(max_position_embeddings=65536))
    tower = VisionTowerConfig(patch_size=14, max_image_tokens=16384)
    seeing = FromScratchConfig(model_type="qwen2_5_vl", max_position_embeddings=65536, vision=tower)
    write_tokenizer(folder / "qwen2_5_vl", seeing)
    for family in ("qwen3_vl", "qwen3_5"):
        write_tokenizer(folder / family, replace(seeing, model_type=family, vision=replace(tower, patch_size=16)))
    shutil.copytree(folder / "qwen3_5", folder / "qwen3_5_moe")
    for name in [*MODELS, "Llama-3.1-8B-RM"]:
        kind = published_config(name)["model_type"] if "vision_config" in published_config(name) else "tokenizer"
        write_model(Path(shutil.copytree(folder / kind, folder / "models" / name)), published_config(name))
    return folder


def write_tokenizer(folder: Path, config: FromScratchConfig) -> None:
    from megarl.learn.models.from_scratch import SPECIAL_TOKENS, VISION_TOKENS, save_tokenizer, train_tokenizer

    texts = [text for rows in PUBLISHED.values() for row in rows for text in map(str, row.values())] + [DOCS]
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if config.sees else ()))
    save_tokenizer(train_tokenizer(texts, 400, special=special), folder, config)


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json beside one safetensors file that is a header and a hole of the right size."""
    (folder / "config.json").write_text(json.dumps(config))
    score = "SequenceClassification" in config["architectures"][0]
    header, end = {}, 0
    full = complete(config)
    for name, shape in architecture(full, "score" if score else "lm").tensors(full).items():
        wide = name.endswith("e_score_correction_bias")
        start, end = end, end + math.prod(shape) * (4 if wide else 2)
        header[name] = {"dtype": "F32" if wide else "BF16", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)


@pytest.fixture
def in_workplace(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There, on a machine with as much memory as the job's nodes have."""
    from megarl.run.checks import settings as setting_checks

    monkeypatch.chdir(workplace)
    monkeypatch.setattr(setting_checks, "available_memory", lambda: 2**50)
    return workplace


@pytest.mark.parametrize("name", [name for name in NODES if name not in LARGE])
def test_megarl_accepts_the_job_but_for_its_gpus(in_workplace: Path, name: str) -> None:
    from megarl.run.checks.job import check

    missing = "parallel.backend=nccl needs GPUs, but this torch"
    if torch.version.cuda:  # the next that is missing
        missing = "model.transformer_impl=transformer_engine, but transformer_engine.pytorch cannot be imported"
    with pytest.raises(ConfigError, match=missing):
        check(experiment(name))
    check(experiment(name), nodes=NODES[name], elsewhere=True)


@pytest.mark.parametrize("kind", STARTERS)
def test_a_folder_of_init_is_accepted_for_its_gpus(
    in_workplace: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from megarl.cli import main

    folder, model = tmp_path / "mine", str(in_workplace / "models" / "Qwen2.5-7B-Instruct")
    assert main(["init", str(folder), "--kind", kind, "--model", model, "--gpus-per-node", "8"]) == 0
    command = ["train", "--config-dir", str(folder), "experiment=mine", "--check", "--gpus-per-node", "8"]
    assert main(command) == 0, caplog.text


def test_a_job_for_other_machines_is_checked_here(in_workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is installed here does not matter then; what would run where is printed."""
    from megarl.cli import main

    caplog.set_level("INFO")
    assert main(["train", "--check", "--gpus-per-node", "8", "experiment=grpo_qwen2_5_7b"]) == 0
    assert "trainer ranks 0-7 on GPUs 0-7, engines 0-7 on GPUs 0-7" in caplog.text
    assert (
        caplog.messages[-1]
        == "not checked: what is installed on those machines, their memory and disks (run.dir, store.folder)"
    )
    assert main(["train", "--check", "--gpus-per-node", "7", "experiment=grpo_qwen2_5_7b"]) == 2
    assert "to use all 7 GPUs: parallel.tp=1 parallel.dp=7 " in caplog.messages[-1]
    assert main(["train", "--check", "experiment=grpo_qwen2_5_7b"]) == 2
    if torch.version.cuda is None:
        assert "--check --gpus-per-node N` checks a job of other machines here" in caplog.messages[-1]


def test_a_check_is_read_at_a_glance(in_workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Model, grids, engines, batch, rows, lengths, rates, intervals, memory, end; then where it runs."""
    from megarl.cli import main

    caplog.set_level("INFO")
    command = ["train", "--check", "--gpus-per-node", "8", "--nodes", "2", "experiment=grpo_qwen3_30b_a3b"]
    assert main(["train", "--check", "--gpus-per-node", "8", "experiment=ppo_llama3_1_8b"]) == 0
    lines = [line for line in "\n".join(caplog.messages).splitlines() if not line.startswith("alarm")]  # few rows
    assert [line.split()[0] for line in lines[:12]] == [
        "model", "trainer", "engines", "batch", "rows", "lengths", "rates", "intervals", "memory", "ends", "node",
        "mode",
    ]  # fmt: skip
    assert lines[0].split()[1:3] == ["8.03", "B"] and "8 ranks (nccl): actor, critic, reward_model tp=4" in lines[1]
    assert "in turn with the trainer" in lines[2] and "1,024 tasks x 1 responses" in lines[3]
    assert "actor 1e-06 after 21 steps, critic 1e-05 after 10 steps" in lines[6]
    assert "MORE THAN" not in lines[8] and lines[8].endswith("of 74.5 GiB a device")
    assert "phase     rank" not in caplog.text
    caplog.clear()
    assert main([*command, "store=postgres", "--verbose"]) == 0
    assert "phase     rank" in caplog.text and "in turn" in caplog.text


ONE_GPU = (
    "parallel=tp1", "parallel.backend=nccl", "rollout.placement=separate", "rollout.replicas=1", "rollout.tp=1",
    "trainer.offload=none", "reference.offload=none", "model.transformer_impl=local", "model.recompute=full",
    "cluster.device_bytes=24000000000",
)  # fmt: skip
"""A trainer on one device of 24 GB, an engine on another."""


def test_adapters_of_a_7b_are_trained_on_24_gb_and_the_model_itself_is_not(
    in_workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megarl.cli import main

    caplog.set_level("INFO")
    command = ["train", "--check", "--gpus-per-node", "2", "experiment=grpo_qwen2_5_7b", *ONE_GPU]
    assert main(command) == 2
    assert "actor.optimizer 85.1 GiB, actor.gradients 28.4 GiB" in caplog.messages[-1]
    caplog.clear()
    assert main([*command, "model.lora.rank=16"]) == 0
    lines = [line for line in "\n".join(caplog.messages).splitlines() if not line.startswith("alarm")]  # few rows
    assert lines[0].endswith("; adapters of rank 16: 40,370,176 of 7,655,986,688 parameters (0.53 %) are trained")
    assert "MORE THAN" not in lines[8] and "of 22.4 GiB a device" in lines[8]
    assert "reference" not in lines[1]


@pytest.mark.parametrize("name", TURNS)
def test_activations_leave_a_part_of_the_device(in_workplace: Path, name: str) -> None:
    """An update that computes nothing again leaves 15 % of 80 GB, by the estimate."""
    from megarl.learn.memory.activation_bytes import activation_bytes
    from megarl.learn.memory.phases import Phase
    from megarl.run.checks.memory import ledger_of

    config = experiment(name)
    hf, trainer = hf_config(config.model.path), config.trainer
    ledger = ledger_of(config, algorithms.get(config.algorithm.name), hf)
    kept = activation_bytes(
        architecture(hf).sizes(hf),
        config.model,
        config.parallel,
        trainer.max_tokens_per_micro_batch,
        trainer.logits_bytes,
    )
    assert ledger.most(Phase.UPDATE).total + kept <= 0.85 * GPU_GB * GB


def test_a_part_of_experiments_is_no_experiment() -> None:
    with pytest.raises(ConfigError, match="experiment=base/gpu is a part that files of configs/experiment share"):
        compose(["experiment=base/gpu"])


def test_gpus_for_a_model_and_rows_of_ones_own() -> None:
    ours, gpu = (compose([f"experiment={name}", *YOURS]) for name in ("own_gpu", "grpo_qwen2_5_7b"))
    assert (ours.parallel.backend, ours.model.transformer_impl) == ("nccl", "transformer_engine")
    assert ours.rollout.gpu_memory_utilization == 0.85 and ours.model.path == "/m"
    assert ours.trainer.logits_bytes == gpu.trainer.logits_bytes


@pytest.mark.parametrize("name", LARGE)
def test_plan_of_a_large_job(in_workplace: Path, name: str) -> None:
    """As above, with two of the engines' ranks instead of all that differ, and the files' tensors without a plan from
    them."""
    from megarl.run.checks import grids as model_checks
    from megarl.run.checks.settings import check_settings
    from megarl.weights.checkpoint.formats.hf_source import check_hf, open_hf

    config = compose([f"experiment={name}", *CPU])
    hf = hf_config(config.model.path)
    check_settings(config, algorithms.get(config.algorithm.name), NODES[name])
    check_parallel(config.parallel, architecture(hf).sizes(hf))
    model_checks.check_engine(config.model.path, hf)
    source = trainer_layout(config.model.path, megatron_grid(config.parallel))
    check_hf(open_hf(Path(config.model.path)), source, hf)
    engines = engine_layout(config.model.path, config.rollout)
    plan = build_plan(source, engines)
    for rank in (0, engines.num_ranks - 1):
        engines.check(rank)
        assert sum(volume(move.box) for move in plan.moves_to(rank)) == sum(
            volume(piece.box) for piece in engines.pieces(rank)
        )


# ------------------------------------------------------------------ what must be refused


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("grpo_qwen2_5_7b", "parallel.tp=8", "parallel.tp=8 does not divide num_attention_heads=28"),
        ("grpo_qwen2_5_7b", "rollout.tp=3", "rollout.tp=3 does not divide num_attention_heads=28"),
        ("grpo_qwen2_5_7b", "parallel.cp=4", "parallel.cp=4 does not divide the 14 attention heads"),
        ("grpo_qwen2_5_7b", "parallel.ep=2", "ep=2"),
        ("grpo_qwen2_5_7b", "rollout.max_response_tokens=65536", "does not hold one sequence"),
        ("grpo_qwen2_5_7b", "rollout.expert_parallel=true", "has no experts"),
        ("ppo_llama3_1_8b", "critic.parallel={tp: 4, dp: 4, backend: gloo}", "critic.parallel tp*pp*dp*cp=4*1*4*1 has "
            "16 ranks"),
        ("grpo_qwen3_30b_a3b", "parallel.pp=5", "parallel.pp=5 does not divide num_hidden_layers=48"),
        ("grpo_qwen3_30b_a3b", "parallel.sequence_parallel=false", "needs parallel.sequence_parallel=true"),
        ("grpo_qwen3_30b_a3b", "parallel.ep=48", "parallel.ep=48 does not divide the 128 experts"),
        ("mix_qwen2_5_7b", "taskset.expert=null", "needs taskset.expert"),
        ("mix_qwen2_5_7b", "trainer.updates_per_step=1000", "updates_per_step=1000 is more than"),
    ],
)  # fmt: skip
def test_bad_combinations_are_refused_by_megarl(in_workplace: Path, name: str, override: str, words: str) -> None:
    from megarl.run.checks.job import check

    wide = ["parallel.dp=12"] if "ep=48" in override else []  # else the ranks are too few, which is said first
    with pytest.raises(ConfigError) as raised:
        check(compose([f"experiment={name}", *CPU, *wide, override]))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("dpo_llama3_1_8b", "parallel=tp1", "GPUs are not 1 nodes"),
        ("grpo_qwen2_5_7b", "rollout.replicas=9", "GPUs are not 1 nodes"),
        ("grpo_qwen2_5_32b", "parallel.tp=1 parallel.dp=64", "GB on a trainer rank"),
        ("grpo_qwen2_5_32b", "rollout.gpu_memory_utilization=0.1", "on an engine's do not fit"),
        ("ppo_llama3_1_8b", "trainer.tasks_per_step=1020", "do not divide by 4 updates and dp=2"),
    ],
)  # fmt: skip
def test_bad_combinations_are_refused_by_this_test(name: str, override: str, words: str) -> None:
    config = compose([f"experiment={name}", *override.split()])
    with pytest.raises(ConfigError, match=words):
        check_job(config, NODES[name])


def test_a_grid_of_ones_own_wins_over_the_experiments() -> None:
    config = compose(["experiment=grpo_qwen2_5_7b", "parallel=tp4dp2sp"])
    assert replace(config.parallel, tp=2, dp=4) == experiment("grpo_qwen2_5_7b").parallel
