"""The buffer that explorer and trainer share: tasks, experiences and steps in SQL, their order, operators on groups.

Code here writes the database, one transaction at a time. It calls no engine and trains no model.
"""

FACE = (
    "experience",
    "experience.held_out",
    "experience.operators",
    "experience.pipeline",
    "order.draws",
    "order.group_choice",
    "order.pacing",
    "store",
    "store.claims",
    "store.database",
    "store.engines",
    "store.selection",
    "store.tables",
    "store.transactions",
)
"""Modules that other packages may import."""
