"""Rollout engines: vLLM servers, and what lives in them or speaks to them."""
