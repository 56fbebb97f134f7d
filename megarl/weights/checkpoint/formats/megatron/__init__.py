"""Files in Megatron's dist_checkpointing format."""
