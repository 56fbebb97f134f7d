"""An engine with hooks that record what its modules compute, for ``megarl diff``."""
