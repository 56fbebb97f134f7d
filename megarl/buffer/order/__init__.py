"""Choice of the tasks, rows and used groups of a step, by ``taskset.order`` and ``buffer.replay``."""
