"""Receiving of weights in an engine, and the link that transports them."""
