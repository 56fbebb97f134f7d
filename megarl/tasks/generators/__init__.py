"""Generators of rows: reasoning-gym's, megarl's own, and those of users."""
