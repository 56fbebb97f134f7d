"""Choice of the tasks, rows and replayed groups of a step, by ``taskset.order`` and ``buffer.replay``."""
