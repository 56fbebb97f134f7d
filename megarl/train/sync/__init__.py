"""Publication of weights to engines, and its proof."""
