"""``make quick``: the files of unit tests that are fast, in two processes. The others start processes, compile, or go
through large tables: `make test` has them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.together import run

UNIT = Path(__file__).parent / "unit"
SLOW = (
    "test_agent_commands", "test_agents", "test_algorithms", "test_algorithms_estimates", "test_algorithms_pairs",
    "test_algorithms_reference", "test_architectures", "test_attention_layout", "test_batching",
    "test_benchmark_pages", "test_buffer_machine", "test_checkpoint_convert", "test_checkpoint_mutations",
    "test_checkpoint_state", "test_cli", "test_config_keys", "test_configs", "test_course", "test_cuda_emulated",
    "test_data_look", "test_disk_full", "test_docstrings", "test_doctor", "test_dry_run",
    "test_environments_of_others", "test_first_gpu", "test_forkserver", "test_harbor", "test_host_memory",
    "test_import_verl",
    "test_late_rewards", "test_launch", "test_launch_checks", "test_launch_data", "test_launch_leftovers",
    "test_launch_nodes", "test_launch_offline", "test_launch_replace", "test_launch_rewards", "test_learning_table",
    "test_link_sockets", "test_local_disk", "test_ops_advantage", "test_ops_policy", "test_ops_torch",
    "test_overrides", "test_own",
    "test_payloads", "test_postgres_programs", "test_replay", "test_report", "test_reshard_execute",
    "test_reshard_families", "test_reshard_oracle", "test_reshard_plan", "test_resume", "test_rewards",
    "test_rewards_forks", "test_rewards_judge", "test_rewards_k12", "test_rewards_math", "test_rewards_workers",
    "test_role_checks", "test_rollout_frames", "test_sanitizers", "test_scale", "test_score_head", "test_shares",
    "test_slurm_scripts", "test_stall", "test_store", "test_store_damage", "test_store_experts", "test_store_outage",
    "test_sweep", "test_task_sources", "test_tasksets", "test_tasksets_school", "test_tools_workflow",
    "test_two_gpus", "test_vision_processor",
)  # fmt: skip
"""Files that take more than about two CPU-seconds, all tests together."""


def fast() -> list[Path]:
    """Files of the unit tests that are not in ``SLOW``. Raises AssertionError for a name in it that is no file."""
    files = {path.stem: path for path in sorted(UNIT.glob("test_*.py"))}
    assert files.keys() >= set(SLOW), f"no such files: {set(SLOW) - files.keys()}"
    return [path for name, path in files.items() if name not in SLOW]


if __name__ == "__main__":
    files = [str(path.relative_to(UNIT.parent.parent)) for path in fast()]
    sys.exit(run((files[::2], files[1::2]), ["-m", "not slow", *sys.argv[1:]]))
