"""Layouts of tensor elements over ranks, and transfer plans between two layouts. No Megatron, no vLLM."""
