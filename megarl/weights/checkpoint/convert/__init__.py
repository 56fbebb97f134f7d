"""``megarl convert``: from one format or grid to another."""
