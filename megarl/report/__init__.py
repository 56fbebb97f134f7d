"""What a person sees of a run: the report of a run directory, and what this machine has (``megarl doctor``)."""
