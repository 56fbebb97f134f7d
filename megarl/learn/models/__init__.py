"""Models: randomly initialised checkpoints, and models built from the architecture table on Megatron-Core."""
