"""Weights from trainer ranks to engines: the link, the receiver inside vLLM, and the proof that both sides agree."""
