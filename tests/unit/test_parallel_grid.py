"""Which sizes make a grid, what the messages say, and that no setting is lost on the way to the layouts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from megarl.config.schema import Config, CriticConfig, ModelConfig, ParallelConfig, ReferenceConfig, RewardModelConfig
from megarl.core.errors import ConfigError
from megarl.learn.parallel.grid import check_parallel, check_roles, megatron_grid, role_grids
from megarl.weights.architectures import architecture
from megarl.weights.reshard.grid import MegatronGrid
from tests.unit.reshard_oracle import qwen3_config

MOE = qwen3_config(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True
)


@pytest.mark.parametrize(
    ("parallel", "expert_tp"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(tp=4), 4),
        (ParallelConfig(tp=2, ep=2), 1),
        (ParallelConfig(tp=2, etp=1), 1),
        (ParallelConfig(tp=2, dp=2, ep=2, etp=2), 2),
        (ParallelConfig(pp=2, vpp=2), 1),
        (ParallelConfig(pp=3, first_stage_layers=1, last_stage_layers=2), 1),
    ],
)
def test_what_is_a_grid(parallel: ParallelConfig, expert_tp: int) -> None:
    check_parallel(parallel)
    assert parallel.expert_tp == megatron_grid(parallel).expert_tp == expert_tp
    assert parallel.world_size == megatron_grid(parallel).world_size


def test_no_setting_is_lost() -> None:
    """A grid size that ``megatron_grid`` forgot would silently be 1 in every layout."""
    names = {f.name for f in dataclasses.fields(ParallelConfig)} & {f.name for f in dataclasses.fields(MegatronGrid)}
    assert names == {f.name for f in dataclasses.fields(MegatronGrid)}
    other = ParallelConfig(**{name: number for number, name in enumerate(sorted(names), start=2)})
    grid = megatron_grid(other)
    assert {name: getattr(grid, name) for name in names} == {name: getattr(other, name) for name in names}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tp=0), r"parallel\.tp=0 is not a positive number; set parallel\.tp to 1 or more"),
        (ParallelConfig(etp=0), r"parallel\.etp=0 is not a positive number"),
        (ParallelConfig(pp=2, first_stage_layers=0), r"parallel\.first_stage_layers=0 is not a positive number"),
        (
            ParallelConfig(dp=2, ep=4),
            r"parallel\.ep=4 \* parallel\.etp=1 does not divide the 2 ranks .*dp=2 .* parallel\.ep to a divisor of 2",
        ),
        (
            ParallelConfig(tp=2, dp=2, ep=2, etp=4),
            r"parallel\.ep=2 \* parallel\.etp=4 does not divide the 4 ranks .*tp=2 pp=1 dp=2",
        ),
        (ParallelConfig(vpp=2), r"parallel\.vpp=2 needs parallel\.pp above 1; .*leave parallel\.vpp out"),
        (ParallelConfig(last_stage_layers=1), r"parallel\.last_stage_layers=1 needs parallel\.pp above 1"),
        (
            ParallelConfig(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=2),
            r"no stage between, .*; give one of the two",
        ),
    ],
)
def test_what_is_no_grid(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(parallel)


def test_what_the_trainer_cannot_train() -> None:
    sizes = architecture(MOE).sizes(MOE)
    check_parallel(ParallelConfig(tp=2, ep=2, sequence_parallel=True), sizes)
    with pytest.raises(
        ConfigError, match=r"parallel\.tp=2 with the 8 experts .* needs parallel\.sequence_parallel=true"
    ):
        check_parallel(ParallelConfig(tp=2, ep=2), sizes)
    check_parallel(ParallelConfig(pp=2, vpp=2), sizes)
    check_parallel(ParallelConfig(cp=sizes.heads), sizes)
    with pytest.raises(
        ConfigError,
        match=rf"parallel\.cp={sizes.heads} does not divide the {sizes.heads // 2} attention heads that parallel\.tp=2",
    ):
        check_parallel(ParallelConfig(tp=2, cp=sizes.heads, sequence_parallel=True), sizes)


ACTOR = ParallelConfig(tp=2, dp=2)


def roles(
    reference: ParallelConfig | None = None, critic: ParallelConfig | None = None, reward: ParallelConfig | None = None
) -> Config:
    return Config(
        parallel=ACTOR,
        reference=ReferenceConfig(parallel=reference),
        critic=CriticConfig(parallel=critic),
        reward_model=RewardModelConfig(parallel=reward),
    )


def test_roles_without_a_grid_have_the_actors() -> None:
    assert list(role_grids(roles()).items()) == [
        (name, ACTOR) for name in ("parallel", "reference.parallel", "critic.parallel", "reward_model.parallel")
    ]
    critic = ParallelConfig(dp=4)
    assert role_grids(roles(critic=critic))["critic.parallel"] is critic
    check_roles(roles())
    check_roles(roles(critic=OVERLAPPED))
    check_roles(roles(ParallelConfig(pp=4), critic, ParallelConfig(tp=2, cp=2, sequence_parallel=True)))


OVERLAPPED = ParallelConfig(dp=4, overlap_grad_reduce=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            roles(ParallelConfig(tp=2)),
            r"reference\.parallel tp\*pp\*dp\*cp=2\*1\*1\*1 has 2 ranks, but parallel tp\*pp\*dp\*cp=2\*1\*2\*1 has 4: "
            r".*; change reference\.parallel\.dp",
        ),
        (
            roles(critic=ParallelConfig(pp=2, dp=4)),
            r"critic\.parallel tp\*pp\*dp\*cp=1\*2\*4\*1 has 8 ranks, .* leave "
            r"critic\.parallel out",
        ),
        (roles(reward=ParallelConfig(cp=2)), r"reward_model\.parallel .*=1\*1\*1\*2 has 2 ranks, but parallel"),
        (
            roles(critic=ParallelConfig(dp=4, ep=3)),
            r"critic\.parallel\.ep=3 \* critic\.parallel\.etp=1 does not divide "
            r".* critic\.parallel\.ep to a divisor",
        ),
        (roles(critic=ParallelConfig(tp=-4, dp=-1)), r"critic\.parallel\.tp=-4 is not a positive number"),
        (
            roles(critic=ParallelConfig(dp=4, sequence_parallel=True)),
            r"critic\.parallel\.sequence_parallel=true needs "
            r"critic\.parallel\.tp above 1",
        ),
        (
            roles(critic=ParallelConfig(dp=4, overlap_param_gather=True)),
            r"critic\.parallel\.overlap_param_gather=true needs critic\.parallel\.overlap_grad_reduce=true",
        ),
        (
            roles(critic=ParallelConfig(pp=2, dp=2, overlap_p2p=True)),
            r"critic\.parallel\.overlap_p2p=true with critic\.parallel\.vpp=1: .*; set critic\.parallel\.vpp above 1",
        ),
        (
            replace(roles(critic=OVERLAPPED), model=ModelConfig(train_vision_tower=True)),
            r"critic\.parallel\.overlap_grad_reduce=true with model\.train_vision_tower=true",
        ),
        (roles(ParallelConfig(dp=4, backend="nccl")), r"reference\.parallel\.backend=nccl, but parallel\.backend=gloo"),
    ],
)
def test_grids_that_do_not_go_together(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_roles(config)
