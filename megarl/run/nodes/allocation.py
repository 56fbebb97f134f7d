"""Machines that a launcher gave to this job, read from the environment: Slurm, torchrun, or no launcher.

Every machine runs one supervisor. Node 0's supervisor, the head, decides; the others (``run/nodes/node_agent.py``)
start the processes that it sends them.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from megarl.core.errors import ConfigError
from megarl.engines.client.auth import KEY_VARIABLE
from megarl.rewards.pool.host import MIN_KEY

Role = Literal["all", "trainer", "rollout"]
"""Processes that may run on a node; ``all`` unless the job has parts (a heterogeneous Slurm job)."""

INTERACTIVE = str(0xFFFFFFFA)
"""Step id of the shell that salloc runs (Slurm's LaunchParameters=use_interactive_step)."""
LOWEST_PORT, PORTS = 20000, 12000
"""Ports of the head if MEGARL_HEAD_PORT is not set: below the ports of outgoing connections."""


@dataclass(frozen=True)
class Allocation:
    """The job's nodes, from the view of one supervisor."""

    rank: int = 0
    """Rank of this node; 0 is the head."""
    nodes: int = 1
    head: str = "127.0.0.1"
    """Address of node 0, where its supervisor accepts the others."""
    port: int = 0
    name: str = ""
    """Name that the launcher gives this node."""
    role: Role = "all"
    launcher: Literal["local", "slurm", "torchrun"] = "local"

    @property
    def is_head(self) -> bool:
        """True on the first node."""
        return self.rank == 0


def find(env: Mapping[str, str] = os.environ) -> Allocation:
    """Return the allocation of this process. MEGARL_HEAD, MEGARL_HEAD_PORT, MEGARL_NODES, MEGARL_NODE_RANK and
    MEGARL_ROLE override the launcher's variables.

    Raises:
        ConfigError: the launcher started too few or too many supervisors, or they share no key.
    """
    if "SLURM_JOB_ID" in env:
        found = _slurm(env)
    elif "TORCHELASTIC_RUN_ID" in env:
        found = _torchrun(env)
    else:
        found = Allocation(name=os.uname().nodename)
    if found.nodes > 1 and len(env.get(KEY_VARIABLE, "")) < MIN_KEY:
        raise ConfigError(
            f"{found.nodes} nodes need one secret of at least {MIN_KEY} characters in ${KEY_VARIABLE}, the same on "
            "all; slurm/common.sh makes one for each job"
        )
    return found


def _slurm(env: Mapping[str, str]) -> Allocation:
    if "SLURM_STEP_NODELIST" not in env or env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")) == INTERACTIVE:
        # a batch script, or a shell in an allocation, which salloc may start as a separate step
        allocated = _number(env, "SLURM_JOB_NUM_NODES") if "SLURM_JOB_NUM_NODES" in env else 1
        if allocated > 1:
            raise ConfigError(
                f"this Slurm job has {allocated} nodes, but megarl was started on one of them: start one on each with "
                "`srun --ntasks-per-node=1 megarl train ...`, as slurm/train_grpo.sh does"
            )
        return Allocation(name=env.get("SLURMD_NODENAME", ""), launcher="slurm")
    nodes = _number(env, "MEGARL_NODES" if env.get("MEGARL_NODES") else "SLURM_STEP_NUM_NODES")
    if not env.get("MEGARL_NODES") and (tasks := _number(env, "SLURM_STEP_NUM_TASKS")) != nodes:
        raise ConfigError(
            f"srun started {tasks} tasks on {nodes} nodes; megarl needs one on each, and starts the rest itself: use "
            "--ntasks-per-node=1"
        )
    return Allocation(
        rank=_number(env, "MEGARL_NODE_RANK" if env.get("MEGARL_NODE_RANK") else "SLURM_PROCID"),
        nodes=nodes,
        # In a batch script srun is called on the job's first node; slurm/common.sh sets MEGARL_HEAD.
        head=env.get("MEGARL_HEAD") or env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        port=_port(env, LOWEST_PORT + _number(env, "SLURM_JOB_ID") % PORTS),
        name=env.get("SLURMD_NODENAME", ""),
        role=_role(env),
        launcher="slurm",
    )


def _torchrun(env: Mapping[str, str]) -> Allocation:
    if _number(env, "LOCAL_WORLD_SIZE") != 1:
        raise ConfigError(
            f"torchrun --nproc-per-node={env['LOCAL_WORLD_SIZE']}: megarl needs one process on each node and starts "
            "the rest itself; use 1"
        )
    return Allocation(
        rank=_number(env, "RANK"),
        nodes=_number(env, "WORLD_SIZE"),
        head=env.get("MEGARL_HEAD") or env.get("MASTER_ADDR", "127.0.0.1"),
        port=_port(env, _number(env, "MASTER_PORT") + 1),  # MASTER_PORT itself is torchrun's
        name=os.uname().nodename,
        role=_role(env),
        launcher="torchrun",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number in a launcher's variable. Raises ConfigError if it is not a number."""
    given = env.get(name, "")
    if not (given.isascii() and given.isdecimal()):
        raise ConfigError(
            f"${name} is {given!r}, which is no number, though other variables of its launcher are set; start megarl "
            "by srun or torchrun, or unset $SLURM_JOB_ID and $TORCHELASTIC_RUN_ID to run on this machine alone"
        )
    return int(given)


def _port(env: Mapping[str, str], otherwise: int) -> int:
    given = env.get("MEGARL_HEAD_PORT")
    if given is not None and not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        raise ConfigError(f"MEGARL_HEAD_PORT={given} is no port; give one of 1..65535, or leave it out")
    return int(given) if given else otherwise


def _role(env: Mapping[str, str]) -> Role:
    role = env.get("MEGARL_ROLE", "all")
    if role not in get_args(Role):
        raise ConfigError(f"MEGARL_ROLE={role}: a node is one of {', '.join(get_args(Role))}")
    return cast(Role, role)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
