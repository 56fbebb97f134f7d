"""Checks of models against settings and grids."""
