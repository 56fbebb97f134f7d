"""The process of an engine: vLLM's server, with endpoints of megarl."""
