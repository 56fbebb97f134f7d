"""Checkpoint files of Hugging Face and Megatron-Core, read and written slice by slice."""
