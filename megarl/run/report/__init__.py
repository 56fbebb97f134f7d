"""Report of a run directory, and of this machine (``megarl doctor``)."""
