"""Agents of others, trained without a change: an endpoint that records what they ask the rollout model."""

from megarl.explore.agents.server import AgentServer
from megarl.explore.agents.session import Session

__all__ = ["AgentServer", "Session"]
