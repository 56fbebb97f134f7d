"""TransformerEngine and apex: taken where they are installed, refused in words where they are asked for and absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.config.schema import ModelConfig, ParallelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models.specs import check_implementation
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3

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


def test_transformer_engine_without_cuda() -> None:
    with pytest.raises(
        ConfigError, match=r"with parallel\.backend=gloo: .* on CUDA alone; set parallel\.backend to nccl, or .* local"
    ):
        check_implementation(TE, ParallelConfig())


OPTIMIZERS = """
import sys
from megarl.learn.parallel import cpu
cpu.install()
import megatron.core.optimizer as optimizer
from megatron.core.optimizer import distrib_optimizer as distributed
taken = {optimizer.Adam, distributed.Adam}
names = [f"{cls.__module__}.{cls.__name__}" for cls in taken]
print(*names, optimizer.USING_PYTORCH_OPTIMIZER, distributed.HAVE_APEX_OR_TE)
"""


def optimizers(*folders: Path) -> str:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPTIMIZERS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fused_adam_that_is_installed_is_left_alone(tmp_path: Path) -> None:
    """Megatron's own flags and classes in a process that has an ``apex``, of which its import takes two names."""
    package = tmp_path / "apex" / "optimizers"
    package.mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import torch\nclass FusedAdam(torch.optim.AdamW): pass\nclass FusedSGD(torch.optim.SGD): pass\n"
    )
    assert optimizers(tmp_path) == "apex.optimizers.FusedAdam False True"


@pytest.mark.skipif(HAVE_TE, reason="TransformerEngine is installed")
def test_without_one_ours_takes_its_place() -> None:
    assert optimizers() == "megarl.learn.parallel.cpu.FusedLayoutAdamW False True"


def logits_and_gradients(rank: int, path: str) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """For the local modules and TransformerEngine's: logits of padded and of packed rows, and gradients as HF names
    them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl.learn.models.gpt import build_chunks, named_tensors, unwrap
    from megarl.learn.parallel import groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import hf_layout, megatron_layout
    from megarl.weights.reshard.plan import build_plan

    groups.initialize(NCCL, seed=1)
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
