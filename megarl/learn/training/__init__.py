"""Log-probs and updates on Megatron-Core's pipeline schedules."""
