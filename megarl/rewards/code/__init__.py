"""Verifiers that run programs."""
