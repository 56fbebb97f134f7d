"""TransformerEngine and apex: used on a GPU where they are installed, never on a CPU; refused where they are absent."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models.specs import FUSION_PACKAGES, check_implementation
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import train

try:
    import transformer_engine.pytorch  # noqa: F401

    HAVE_TE = True
except (ImportError, OSError):
    HAVE_TE = False

TE = ModelConfig(transformer_impl="transformer_engine")
NCCL = ParallelConfig(backend="nccl")


def test_local_modules_are_always_there() -> None:
    for parallel in (ParallelConfig(), NCCL):
        check_implementation(ModelConfig(), parallel)


@pytest.mark.skipif(HAVE_TE, reason="TransformerEngine is installed")
def test_transformer_engine_that_is_not_installed() -> None:
    message = (
        r"model\.transformer_impl=transformer_engine, but .*No module named 'transformer_engine'.*; install .* to local"
    )
    with pytest.raises(ConfigError, match=message):
        check_implementation(TE, NCCL)


def test_transformer_engine_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (package / "__init__.py").write_text("import ctypes\nctypes.CDLL('libnot_there.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"cannot be imported \(libnot_there\.so: .*\); install .* to local"):
        check_implementation(TE, NCCL)
    del sys.modules["transformer_engine"]  # Megatron-Core would find it


def test_transformer_engine_without_cuda() -> None:
    with pytest.raises(
        ConfigError, match=r"with parallel\.backend=gloo: .* on CUDA alone; set parallel\.backend to nccl, or .* local"
    ):
        check_implementation(TE, ParallelConfig())


@pytest.mark.parametrize("fusion", FUSION_PACKAGES)
def test_fusions_without_cuda_or_their_package(fusion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(fusions=[fusion])
    with pytest.raises(ConfigError, match=f"has {fusion} with parallel.backend=gloo: .* or leave it out"):
        check_implementation(model, ParallelConfig())
    monkeypatch.setitem(sys.modules, FUSION_PACKAGES[fusion][0], None)
    with pytest.raises(ConfigError, match=f"has {fusion}, but .* cannot be imported .*; install .* or leave it out"):
        check_implementation(model, NCCL)


def test_moments_in_bfloat16_without_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(dtype="bfloat16", moments_dtype="bfloat16")
    check_implementation(model, ParallelConfig())  # megarl's Adam
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", None)
    message = r"moments_dtype=bfloat16, but .* cannot be imported .*; install TransformerEngine .* to float32"
    with pytest.raises(ConfigError, match=message):
        check_implementation(model, NCCL)


def test_deepep_without_cuda_or_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(moe_dispatcher="deepep")
    with pytest.raises(ConfigError, match=r"deepep with parallel\.backend=gloo: .* on CUDA alone; .* to alltoall"):
        check_implementation(model, ParallelConfig())
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigError, match=r"deepep, but deep_ep cannot be imported .*; install DeepEP .* to alltoall"):
        check_implementation(model, NCCL)


def fused(rank: int, path: str) -> list[bool]:
    from megarl.learn.models.gpt import transformer_config
    from megarl.weights.checkpoint.formats import hf

    hf_config, names = hf.read_hf_config(Path(path)), ("gradient_accumulation_fusion",)
    models = ModelConfig(), ModelConfig(fusions=list(names))  # type: ignore[arg-type]
    return [getattr(transformer_config(hf_config, model, NCCL), name) for model in models for name in names]


def test_a_fusion_is_megatrons_setting(model: str) -> None:
    """The other one is refused by Megatron-Core itself where its package is missing."""
    assert run_grid(1, fused, model) == [[False, True]]


def eight_bits(rank: int, path: str) -> list[tuple[Any, ...]]:
    from megarl.learn.models.gpt import transformer_config
    from megarl.weights.checkpoint.formats import hf

    recipes: tuple[Any, ...] = (None, "tensorwise", "blockwise")
    configs = [transformer_config(hf.read_hf_config(Path(path)), ModelConfig(fp8=recipe), NCCL) for recipe in recipes]
    return [(c.fp8, c.fp8_recipe if c.fp8 else None, c.disable_parameter_transpose_cache) for c in configs]


def test_eight_bits_are_megatrons_settings(model: str) -> None:
    (found,) = run_grid(1, eight_bits, model)
    assert found == [(None, None, False), ("hybrid", "tensorwise", True), ("e4m3", "blockwise", True)]


def test_eight_bits_without_cuda_or_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(fp8="tensorwise")
    with pytest.raises(ConfigError, match=r"fp8=tensorwise with parallel\.backend=gloo: .* set model\.fp8 to null"):
        check_implementation(model, ParallelConfig())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(
        ConfigError, match=r"fp8=tensorwise, but .* install TransformerEngine .* set model\.fp8 to null"
    ):
        check_implementation(model, NCCL)


OURS = "megarl.learn.parallel.cpu.FusedLayoutAdamW False True"
FUSED = "transformer_engine.pytorch.optimizers.fused_adam" if HAVE_TE else "apex.optimizers"


def optimizers(rank: int, device: str) -> str:
    """Adam and Megatron's flags in a process that takes itself for one on a "cpu" or a "gpu"."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer as distributed
    from megatron.core.transformer import multi_latent_attention  # noqa: F401  before CUDA seems to be there

    from megarl.learn.parallel import cpu

    torch.cuda.is_available = lambda: device == "gpu"
    cpu.install()
    taken = {optimizer.Adam, distributed.Adam}
    names = [f"{cls.__module__}.{cls.__name__}" for cls in taken]
    return " ".join([*names, str(optimizer.USING_PYTORCH_OPTIMIZER), str(distributed.HAVE_APEX_OR_TE)])


def train_beside_it(rank: int, path: str, without: str | None) -> tuple[str, str, list[tuple[float, float]]]:
    """Module of the norm that Megatron's import took; the optimizers; losses and norms of some steps."""
    from megatron.core.optimizer import clip_grads

    taken = clip_grads.l2_norm_impl.__module__
    steps = train(rank, path, ParallelConfig(), "float32", without)
    return taken, optimizers(rank, "cpu"), steps


@pytest.fixture(scope="module")
def apex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an ``apex`` and its ``amp_C``: names that Megatron's optimizer imports, none of which computes."""
    folder = tmp_path_factory.mktemp("apex")
    for package in ("optimizers", "multi_tensor_apply"):
        (folder / "apex" / package).mkdir(parents=True)
    (folder / "apex" / "__init__.py").touch()
    (folder / "apex" / "optimizers" / "__init__.py").write_text(
        "import torch\n"
        "class FusedAdam(torch.optim.AdamW):\n"
        "    def __init__(self, *args, adam_w_mode, **kwargs): super().__init__(*args, **kwargs)\n"
        "    def step(self, closure=None): raise RuntimeError('CUDA error: FusedAdam')\n"
        "class FusedSGD(torch.optim.SGD): pass\n"
    )
    (folder / "apex" / "multi_tensor_apply" / "__init__.py").write_text(
        "def multi_tensor_applier(op, *args): return op(1, *args)\n"
    )
    (folder / "amp_C.py").write_text(
        "def multi_tensor_l2norm(*args): raise RuntimeError('CUDA error: l2norm')\n"
        "def multi_tensor_scale(*args): raise RuntimeError('CUDA error: scale')\n"
    )
    return folder


def apart(rank: int, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Result or traceback of each call, in a fork of this process that Megatron has been imported in."""
    import megatron.core.optimizer
    import megatron.core.transformer.multi_latent_attention  # noqa: F401  before CUDA seems to be there

    import megarl.learn.training.model  # noqa: F401

    found = []
    for function, arguments in calls:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                result = function(rank, *arguments)
            except BaseException:
                result = traceback.format_exc()
            with open(write, "wb") as output:
                pickle.dump(result, output)
            os._exit(0)
        os.close(write)
        with open(read, "rb") as given:
            found.append(pickle.load(given))
        os.waitpid(pid, 0)
    return found


POINTS = ("_fused_layout_adam", "_local_implementations")


@pytest.fixture(scope="module")
def beside_apex(apex: Path, model: str) -> dict[str, Any]:
    """What functions give on the one rank of a CPU, in new processes that find the package."""
    calls: dict[str, Any] = {"on a gpu": (optimizers, ("gpu",))}
    calls |= {point or "trained": (train_beside_it, (model, point)) for point in (None, *POINTS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(apex))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        [found] = run_grid(1, apart, [*calls.values()], gpus=True)  # a fork would have imported Megatron before
    return dict(zip(calls, found, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3")))


def test_on_a_gpu_an_installed_fused_adam_is_left_alone(beside_apex: dict[str, Any]) -> None:
    assert beside_apex["on a gpu"] == f"{FUSED}.FusedAdam False True"


@pytest.mark.skipif(HAVE_TE, reason="TransformerEngine is installed")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_without_one_ours_takes_its_place(device: str) -> None:
    assert run_grid(1, optimizers, device) == [OURS]


def test_a_cpu_trains_beside_an_installed_package(model: str, beside_apex: dict[str, Any]) -> None:
    """Bit for bit as without it."""
    expected = run_grid(1, train, model, ParallelConfig(), "float32", None)[0]
    taken, adam, found = beside_apex["trained"]
    assert taken != "megatron.core.utils", "the package was not found"
    assert adam == OURS
    assert found == expected


@pytest.mark.parametrize("point", POINTS)
def test_each_point_is_needed_there(beside_apex: dict[str, Any], point: str) -> None:
    assert "CUDA error" in beside_apex[point]


def logits_and_gradients(rank: int, path: str) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """For the local modules and TransformerEngine's: logits of padded and of packed rows, and gradients as HF names
    them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl.learn.models.gpt import build_chunks, named_tensors, unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout, megatron_layout
    from megarl.weights.reshard.plan import build_plan

    process_groups.initialize(NCCL, seed=1)
    hf_config = hf.read_hf_config(Path(path))
    tokens = torch.randint(2, VOCAB, (3, 32), generator=torch.Generator().manual_seed(0)).cuda()
    cu = torch.tensor([0, 32, 64, 96], dtype=torch.int32).cuda()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=32, max_seqlen_kv=32)
    found = []
    for impl in ("local", "transformer_engine"):
        model = ModelConfig(path=path, dtype="bfloat16", transformer_impl=impl)  # type: ignore[arg-type]
        chunks = build_chunks(hf_config, model, NCCL)
        tensors = named_tensors(chunks[0])
        layout = megatron_layout(hf_config, megatron_grid(NCCL), transformer_impl=model.transformer_impl)
        hf.load_into(Path(path), layout, rank, tensors)
        rows = chunks[0](tokens, None, None)
        flat = chunks[0](tokens.view(1, -1), None, None, packed_seq_params=packed)
        logits = torch.cat([rows.flatten(0, 1), flat[0]])[:, :VOCAB].float()
        (logits[: rows[..., 0].numel()].log_softmax(-1)[..., 7].mean()).backward()
        target = hf_layout(hf_config)
        gradients = {name: torch.zeros(shape) for name, shape in target.local_shapes(0).items()}
        local = {name: p.grad for name, p in unwrap(chunks[0]).named_parameters()}
        for move in build_plan(layout, target).moves:
            size = [hi - lo for lo, hi in move.box]
            source = tuple(slice(a, a + n) for a, n in zip(move.src_at, size, strict=True))
            goal = tuple(slice(a, a + n) for a, n in zip(move.dst_at, size, strict=True))
            gradient: Any = local[move.src_local]
            gradients[move.dst_local][goal] = gradient[source].float().cpu()
        found.append((logits.detach().cpu(), gradients))
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.skipif(not HAVE_TE, reason="TransformerEngine is not installed")
def test_transformer_engine_computes_what_the_local_modules_do(tmp_path: Path) -> None:
    """In bfloat16, whose 8 bits of mantissa the two round at different places."""
    ((local, local_gradients), (te, te_gradients)) = run_grid(
        1, logits_and_gradients, str(save_tiny_qwen3(tmp_path)), gpus=True
    )[0]
    assert (local - te).abs().max() < 0.05 * local.abs().max()
    for name, gradient in local_gradients.items():
        assert (gradient - te_gradients[name]).norm() < 0.1 * gradient.norm(), name
