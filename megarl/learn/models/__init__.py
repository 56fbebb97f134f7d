"""Models: made from scratch here, or built from a table on Megatron-Core."""
