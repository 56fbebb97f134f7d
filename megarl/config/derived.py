"""Values derived from settings: lengths of rollouts, and the sections of models beside the actor.

The role of a teacher is named as its section is, ``teachers.NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.config.schema import Config, CriticConfig, ReferenceConfig, RewardModelConfig, RolloutConfig, TeacherConfig


def prompt_tokens(rollout: RolloutConfig) -> int:
    """Most tokens of a prompt: the setting, or the longest prompt found when the job was checked
    (``run/run_dir/prepare.py``)."""
    assert rollout.max_prompt_tokens is not None, "filled in before launch, see run/run_dir/prepare.py"
    return rollout.max_prompt_tokens


def context_tokens(rollout: RolloutConfig) -> int:
    """Most tokens of a trajectory: a prompt and its response, or all its turns."""
    return rollout.max_trajectory_tokens or prompt_tokens(rollout) + rollout.max_response_tokens


RoleConfig = ReferenceConfig | CriticConfig | RewardModelConfig | TeacherConfig
ROLES = ("reference", "critic", "reward_model")
"""Sections that every job has."""
TEACHERS = "teachers"


def teacher_role(name: str) -> str:
    """Return the role of a teacher."""
    return f"{TEACHERS}.{name}"


def is_teacher(role: str) -> bool:
    """Return True if a role is a teacher's."""
    return role.startswith(f"{TEACHERS}.")


def sections_of(config: Config) -> dict[str, RoleConfig]:
    """Role -> its section of the settings, whether or not the job has such a model."""
    found: dict[str, RoleConfig] = {
        "reference": config.reference,
        "critic": config.critic,
        "reward_model": config.reward_model,
    }
    return found | {teacher_role(name): teacher for name, teacher in config.teachers.items()}


def path_of(config: Config, role: str) -> str | None:
    """Return the checkpoint that a role's section names; None for none."""
    section = sections_of(config)[role]
    return None if isinstance(section, ReferenceConfig) else section.path


def with_sections(config: Config, sections: Mapping[str, RoleConfig]) -> Config:
    """Return the settings with other sections for some roles."""
    own: dict[str, Any] = {role: section for role, section in sections.items() if not is_teacher(role)}
    teachers: dict[str, Any] = {name: sections.get(teacher_role(name), old) for name, old in config.teachers.items()}
    return replace(config, **own, teachers=teachers)


def teachers_at(teachers: Mapping[str, TeacherConfig], step: int) -> dict[str, TeacherConfig]:
    """Return the teachers with their weights after ``step`` completed steps (``decay_steps``)."""
    return {
        name: t if t.decay_steps is None else replace(t, weight=t.weight * max(0.0, 1.0 - step / t.decay_steps))
        for name, t in teachers.items()
    }


def teacher_of(teachers: Mapping[str, TeacherConfig], data_source: str) -> str | None:
    """Return the name of the teacher of a task: the one that names its data source, else the longest prefix of it, else
    the one without sources; None if there is none."""
    best: tuple[int, str] | None = None
    for name, teacher in teachers.items():
        for source in teacher.sources or [""]:
            exact, prefix = source == data_source, not source or source.endswith("/")
            if exact or (prefix and data_source.startswith(source)):
                best = max(best or (-1, ""), (len(source) + exact, name))
    return None if best is None else best[1]
