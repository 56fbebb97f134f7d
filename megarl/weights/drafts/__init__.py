"""First drafts of tables for new model families (``megarl add-model``)."""
