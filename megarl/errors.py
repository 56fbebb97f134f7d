"""The errors a user can meet. Each message names the rule, the value seen and the mend.

A user's input raises a ``ValueError`` subclass before any process is launched; what goes wrong while a job
runs raises a ``RuntimeError`` subclass and ends the job with that text on top.
"""


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type, or does not fit the model, the grid or the machine."""


class DataError(ValueError):
    """A data row that cannot be used; the message gives file, row number and field."""


class ArchitectureError(ValueError):
    """A model that has no table in ``megarl.architectures`` or whose configuration the table does not cover."""


class PlanError(ValueError):
    """A reshard plan that would not write every destination element exactly once."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or of another model."""


class WeightSyncError(RuntimeError):
    """Weights in an engine differ from the trainer's after a sync, or the sync did not end."""


class EngineError(RuntimeError):
    """The rollout engine refused a request or is gone."""


class JobError(RuntimeError):
    """A process of the job died; the message carries its last lines."""
