"""Agents of others, trained without a change: an endpoint that records what they ask the rollout model."""
