"""Training state: saved beside the training, found and loaded again."""
