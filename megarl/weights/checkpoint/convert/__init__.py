"""Conversion of checkpoints between formats and grids (``megarl convert``)."""
