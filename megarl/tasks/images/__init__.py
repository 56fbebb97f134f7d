"""Images of rows: their place in a prompt, and their tensors for a model."""
