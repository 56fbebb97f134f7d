"""A job on images, which an environment shows with each message: engine and trainer agree on every token, its tower
learns or stays, and a killed one goes on with the same bits."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from megarl.buffer.order.draws import EXPERT, data_seed, num_expert_rows, numbers_of_step
from megarl.buffer.store import Store
from megarl.config import Config, compose
from megarl.core.schema import file_digest
from megarl.run.run_dir.prepare import make
from megarl.tasks import ChatTokenizer, chat_messages, read_rows
from megarl.tasks.image_processor import Processor
from tests.loop import picture_agent, picture_game
from tests.loop.same_run import learned, left_alone, steps_of, whole_and_killed
from tests.parallel import peft_twin
from tests.parallel.families import score_class
from tests.system.jobs import START_S, last_of_each

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS = 4
SETTINGS = (
    "experiment=vision",
    f"trainer.steps={STEPS}",
    "trainer.tasks_per_step=8",
    "trainer.checkpoint_interval=2",
    "trainer.eval_interval=0",
    "trainer.warm_start.steps=3",
    "trainer.max_patches_per_micro_batch=512",
    "taskset.train_size=64",
    "taskset.eval_size=16",
    "taskset.warm_start_size=64",
    "rollout.kv_cache_bytes=33554432",
    "rollout.max_num_seqs=64",
)

TURNS = ("rollout.max_trajectory_tokens=64", "trainer.warm_start.steps=30")
WORKFLOWS = {
    "environment": ("rollout.workflow=environment", f"rollout.environment={picture_game.__file__}"),
    "agent": ("rollout.workflow=agent", f"rollout.agent={picture_agent.__file__}", "rollout.agent_rewards=true"),
}
FEWER = ("algorithm.group_size=4", "trainer.warm_start.batch_size=16", "trainer.warm_start.optimizer.warmup_steps=3")
"""Smaller steps of the jobs whose bits are compared."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job that was left alone, and one that was killed in its fourth step and went on from its second, with engines
    that leave while the trainer computes."""
    then = ("rollout.placement=colocated",)
    settings = (*SETTINGS, *TURNS, *WORKFLOWS["environment"], *FEWER)
    with whole_and_killed(tmp_path_factory.mktemp("vision"), settings, 3, 2, then=then) as runs:
        yield runs


def test_engine_and_trainer_agree(runs: tuple[Path, Path]) -> None:
    steps = steps_of(runs[0])
    assert len(steps) == STEPS
    assert all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps)


def test_prompts_have_a_placeholder_for_each_vector(runs: tuple[Path, Path]) -> None:
    store = Store(f"sqlite:///{runs[0]}/store.db", read_only=True)
    found = store.groups.trajectories("train-000000")
    images = store.tasks.images({trajectory.task_id for trajectory in found})
    assert len(images) == len({trajectory.task_id for trajectory in found}) == 8
    assert all(int((trajectory.prompt.token_ids == 7).sum()) == 4 for trajectory in found)
    store.close()


def test_pictures_of_every_turn_are_kept(runs: tuple[Path, Path]) -> None:
    check_pictures(runs[0])


@pytest.mark.soak  # the same turns as the environment's
def test_an_agent_shows_the_same_pictures(tmp_path: Path) -> None:
    with left_alone(tmp_path / "agent", (*SETTINGS, *TURNS, *WORKFLOWS["agent"], "trainer.steps=2")) as run:
        steps = steps_of(run)
        assert len(steps) == 2 and all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps)
        check_pictures(run)


def check_pictures(run: Path) -> None:
    """Check that trajectories which have seen every picture were shown the task's, it upside down, and it again."""
    with closing(Store(f"sqlite:///{run}/store.db", read_only=True)) as store:
        found = store.groups.trajectories("train-000000")
        shown = [[len(turn.images) for turn in trajectory.turns if turn.author != "model"] for trajectory in found]
        whole = [t for t, images in zip(found, shown, strict=True) if images == [1, 1, 1]]
        assert whole, "some trajectories have seen every picture"
        files = store.tasks.images({trajectory.task_id for trajectory in found})
        beside = store.groups.images([trajectory.group_id for trajectory in found])
    for trajectory in whole:
        [own] = files[trajectory.task_id]
        expected = [own, picture_agent.turned(own), own]
        seen = [digest for turn in trajectory.turns for digest in turn.images]
        assert seen == [file_digest(file) for file in expected] and beside[seen[1]] == expected[1]


def test_the_tower_learns(runs: tuple[Path, Path]) -> None:
    before, after = (load_file(runs[0] / name / "model.safetensors") for name in ("reference", "hf"))
    moved = [name for name in before if name.startswith("visual.") and not torch.equal(before[name], after[name])]
    assert len(moved) == sum(name.startswith("visual.") for name in before)


def test_a_killed_job_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    whole, killed = map(learned, runs)
    assert whole == killed and any("actor/pg_loss" in name for name in whole)


@pytest.mark.soak
def test_layers_that_add_vectors_of_images(tmp_path: Path) -> None:
    """Qwen3-VL: engine and trainer agree, every tensor of its tower learns, and a killed job has the same bits."""
    settings = (*SETTINGS, "model.from_scratch.model_type=qwen3_vl")
    with whole_and_killed(tmp_path, settings, 3, 2, then=("rollout.placement=colocated",)) as runs:
        whole, killed = map(learned, runs)
        assert whole == killed and any("actor/pg_loss" in name for name in whole)
        steps = steps_of(runs[0])
        assert len(steps) == STEPS
        assert all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps)
        before, after = (load_file(runs[0] / name / "model.safetensors") for name in ("reference", "hf"))
        tower = [name for name in before if name.startswith("model.visual.")]
        assert any("deepstack" in name for name in tower)
        assert not any(torch.equal(before[name], after[name]) for name in tower)


@pytest.mark.soak
def test_gated_delta_nets_with_images(tmp_path: Path) -> None:
    """Qwen3.5: engine and trainer agree as far as bfloat16 lets them, its tower learns, and a killed job has the same
    bits; but for the engine's log-probs, whose bits depend on the prompts that it computes at once."""
    settings = (*SETTINGS, "model.from_scratch.model_type=qwen3_5", "model.dtype=bfloat16")
    with whole_and_killed(tmp_path, settings, 3, 2, then=("rollout.placement=colocated",)) as runs:
        whole, killed = (
            {name: value for name, value in learned(run).items() if not re.search("_diff|/ess/", name)} for run in runs
        )
        assert whole == killed and any("actor/pg_loss" in name for name in whole)
        assert any("linear_attn" in name for name in whole)
        steps = steps_of(runs[0])
        assert len(steps) == STEPS
        assert all(0 < step["training/rollout_logp_diff_mean"] < 0.05 for step in steps)
        before, after = (load_file(runs[0] / name / "model.safetensors") for name in ("reference", "hf"))
        tower = [name for name in before if name.startswith("model.visual.")]
        assert tower and any(not torch.equal(before[name], after[name]) for name in tower)


@pytest.mark.parametrize("algorithm", [pytest.param("sft", marks=pytest.mark.soak), "dpo", "reward_model"])
def test_offline_jobs_have_images(tmp_path: Path, algorithm: str) -> None:
    """An evaluation after other batches finds its images again; four steps move its loss, not always down."""
    settings = (f"algorithm={algorithm}", "trainer.eval_interval=2", "trainer.optimizer.lr=1e-3")
    with left_alone(tmp_path / algorithm, (*SETTINGS, *settings)) as run:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [record["val/loss"] for record in records if "val/loss" in record]
        assert len(losses) == 3 and len(set(losses)) == 3 and all(map(math.isfinite, losses))
        if algorithm == "reward_model":
            _, info = score_class().from_pretrained(run / "hf", output_loading_info=True)
            assert not any(info.values()), "transformers' class has exactly these tensors"


FEW = (*SETTINGS, "trainer.steps=2", "trainer.warm_start.steps=0", "trainer.updates_per_step=1")


def prepared(folder: Path, *settings: str) -> Config:
    """Settings of a job, with its model and rows made."""
    return make(compose(last_of_each([f"run.dir={folder}", *FEW, *settings])))


def inputs_of(ids: Sequence[int], files: Sequence[bytes], processor: Processor) -> dict[str, torch.Tensor]:
    """Arguments of transformers' models for one sequence with its images."""
    tokens = torch.tensor([list(ids)])
    made = [processor.pixels(file) for file in files]
    return {
        "input_ids": tokens,
        "pixel_values": torch.cat([torch.from_numpy(pixels) for pixels, _ in made]),
        "image_grid_thw": torch.tensor([grid for _, grid in made]),
        "mm_token_type_ids": (tokens == 7).int(),
    }


@torch.no_grad()
def test_a_reward_model_and_a_critic_see_the_images(tmp_path: Path) -> None:
    """Scores of the first step are those of transformers' class with each task's picture, and not with another's; the
    critic begins at 0 and learns."""
    run = tmp_path / "ppo"
    model = Path(prepared(run, "algorithm=ppo").model.path)
    path = Path(shutil.copytree(model, tmp_path / "scores"))
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    judge = score_class()(config).float().eval()
    judge.save_pretrained(path)
    settings = ("algorithm=ppo", f"reward_model.path={path}", "critic.optimizer.lr=1e-3")
    with left_alone(run, (*FEW, *settings)) as run_dir:
        first, second = steps_of(run_dir)
        with closing(Store(f"sqlite:///{run_dir}/store.db", read_only=True)) as store:
            found = store.groups.trajectories("train-000000")
            images = store.tasks.images({trajectory.task_id for trajectory in found})
    processor, own, others = Processor.open(model), [], []
    tasks = sorted(images)
    other = dict(zip(tasks, [images[task] for task in (*tasks[1:], tasks[0])], strict=True))
    # transformers takes a sampled placeholder for one of an image: a token that occurs nowhere stands for it.
    spare = max(set(range(128)).difference(*(turn.token_ids.tolist() for each in found for turn in each.turns)))
    embedding = judge.get_input_embeddings().weight
    embedding[spare] = embedding[7]
    for trajectory in found:
        response = [spare if token == 7 else token for token in trajectory.response.token_ids.tolist()]
        ids = [*trajectory.prompt.token_ids.tolist(), *response]
        for scores, files in ((own, images), (others, other)):
            inputs = inputs_of(ids, files[trajectory.task_id], processor)
            scores.append(float(judge(**inputs).logits))
    assert first["reward_model/score/mean"] == pytest.approx(sum(own) / len(own), abs=1e-5)
    assert abs(sum(own) - sum(others)) / len(own) > 1e-4
    assert first["critic/values/mean"] == 0 != second["critic/values/mean"]
    names = ("critic/vf_loss", "critic/grad_norm", "critic/values/mean", "critic/returns/mean")
    assert all(math.isfinite(step[name]) for step in (first, second) for name in names)
    assert first["critic/vf_loss"] > 0 and second["critic/vf_loss"] != first["critic/vf_loss"]


@torch.no_grad()
def test_expert_rows_are_learned_with_their_images(tmp_path: Path) -> None:
    """The first step's loss of expert rows is that of transformers with their own pictures, and not with others."""
    run = tmp_path / "mix"
    expert = ("algorithm=mix", f"taskset.expert={run}/data/expert.parquet", "taskset.expert_size=16")
    config = prepared(run, *expert)
    model = Path(config.model.path)
    with left_alone(run, (*FEW, *expert)) as run_dir:
        first, second = steps_of(run_dir)
    tokenizer, processor = ChatTokenizer.open(model), Processor.open(model)
    count = num_expert_rows(8 * config.algorithm.group_size, 0.2)
    numbers = numbers_of_step(16, 0, count, data_seed(config.trainer.seed, 0), EXPERT)
    rows = read_rows(run / "data" / "expert.parquet", require_response=True)
    actor = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()

    def loss(shift: int) -> float:
        logp: list[float] = []
        for number in numbers:
            files = rows[(number + shift) % 16].images
            text = tokenizer.render(chat_messages(rows[number]), rows[number].chat_template_kwargs)
            prompt = processor.prompt_ids(text, files).tolist()
            response = tokenizer.response_ids(str(rows[number].response)).tolist()
            logits = actor(**inputs_of([*prompt, *response], files, processor)).logits[0].log_softmax(-1)
            logp += [float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(response)]
        return -sum(logp) / len(logp)

    assert first["actor/sft_loss"] == pytest.approx(loss(0), abs=1e-5)
    assert abs(first["actor/sft_loss"] - loss(1)) > 1e-4
    assert math.isfinite(second["actor/sft_loss"])


@pytest.mark.soak
def test_a_frozen_tower_stays(tmp_path: Path) -> None:
    settings = ("model.train_vision_tower=false", "trainer.steps=1", "parallel=pp2")
    with left_alone(tmp_path / "frozen", (*SETTINGS, *settings)) as run:
        given, after = (load_file(run / name / "model.safetensors") for name in ("model", "hf"))
        tower = [name for name in given if name.startswith("visual.")]
        assert tower and all(torch.equal(given[name], after[name]) for name in tower)
        assert not torch.equal(given["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert steps_of(run)[0]["training/rollout_logp_diff_max"] < 1e-4


@pytest.mark.soak
@torch.no_grad()
def test_adapters_of_a_tower_are_read_by_peft(tmp_path: Path) -> None:
    """The tower's adapters learn, reach the engine, and are PEFT's: with the model that the warm start left they are
    what was exported."""
    targets = "model.lora.targets=[all-linear,embed_tokens,attn.qkv,visual.merger.mlp.0]"
    settings = ("model.train_vision_tower=false", "model.lora.rank=4", targets, "trainer.optimizer.lr=1e-3")
    with left_alone(tmp_path / "adapted", (*SETTINGS, *settings)) as run:
        assert all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps_of(run))
        written = load_file(run / "adapter" / "adapter_model.safetensors")
        tower = [name for name in written if ".visual." in name and "lora_B" in name]
        assert len(tower) == 3 and all(written[name].any() for name in tower)
        exported, base = (
            AutoModelForImageTextToText.from_pretrained(run / name, dtype=torch.float32).eval()
            for name in ("hf", "reference")
        )
        adapted = peft_twin.of_files(base, run / "adapter").eval()
    inputs = {
        "input_ids": torch.tensor([[5, *[7] * 4, 9, 10]]),
        "pixel_values": torch.randn(16, 3 * 2 * 7 * 7, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, 0]]),
    }
    expected, found = exported(**inputs).logits, adapted(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with adapted.disable_adapter():
        assert float((adapted(**inputs).logits - expected).abs().max()) > 1e-2
