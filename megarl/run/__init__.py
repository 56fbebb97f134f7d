"""A job: checked, placed, started, watched, reported."""
