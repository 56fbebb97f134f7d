"""Parallel degrees, process groups, and Megatron-Core on a machine without CUDA."""
