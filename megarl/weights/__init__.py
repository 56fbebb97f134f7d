"""Weights without a model: layouts of tensors over ranks, files, and conversion between them.

Code here imports ``core``, ``config`` and ``ops``. It builds no model and uses only names of Megatron's parameters.
"""

FACE = (
    "architectures",
    "architectures.megatron_config",
    "architectures.rope",
    "architectures.table",
    "checkpoint.convert.adapters",
    "checkpoint.convert.command",
    "checkpoint.convert.convert",
    "checkpoint.convert.verify",
    "checkpoint.formats.dist",
    "checkpoint.formats.hf",
    "checkpoint.formats.hf_source",
    "checkpoint.formats.output",
    "checkpoint.formats.overwrite",
    "checkpoint.formats.peft",
    "checkpoint.formats.score_files",
    "checkpoint.formats.slices",
    "checkpoint.training.disk_space",
    "checkpoint.training.kept_state",
    "checkpoint.training.manifest",
    "checkpoint.training.remote_folder",
    "checkpoint.training.state",
    "checkpoint.training.writer",
    "drafts.command",
    "megatron_private",
    "reshard.adapter_proof",
    "reshard.adapters",
    "reshard.buckets",
    "reshard.copy",
    "reshard.execute",
    "reshard.grid",
    "reshard.layout",
    "reshard.layouts",
    "reshard.plan",
    "reshard.sent_proof",
)
"""Modules that other packages may import."""
