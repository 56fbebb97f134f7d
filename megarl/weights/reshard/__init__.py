"""Layouts of a tensor's elements over ranks, and plans of transfers between two of them. No Megatron, no vLLM."""
