"""Images of rows: where they stand in a prompt, and the tensors that a model takes."""
