"""First drafts of tables for model families that have none (``megarl add-model``)."""
