"""The launcher: a job is checked, placed, started, watched and reported.

Code here starts processes and reads the files that they write. It computes no loss and samples nothing.
"""

FACE = (
    "checks.job",
    "data.command",
    "data.open_run",
    "data.show",
    "job_store",
    "launch.bench",
    "launch.job",
    "launch.scale",
    "launch.starter",
    "launch.store",
    "launch.subjects",
    "launch.sweep",
    "nodes.fit",
    "nodes.gpu_state",
    "nodes.plan",
    "planning",
    "process.interrupt",
    "process.ports",
    "process.process",
    "replay",
    "report.doctor",
    "report.html",
    "run_dir.prepare",
    "supervise.process_specs",
    "watch.command",
)
"""Modules that other packages may import."""
