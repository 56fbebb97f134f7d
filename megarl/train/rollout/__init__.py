"""Rollouts: requested, read, evaluated."""
