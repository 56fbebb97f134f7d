"""Publication and verification of weights in engines."""
