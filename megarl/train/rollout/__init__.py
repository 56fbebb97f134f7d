"""Rollouts: asked for, read, evaluated."""
