"""Files of Megatron's dist_checkpointing."""
