"""Generators of rows: from reasoning-gym, from megarl, and from files of users."""
