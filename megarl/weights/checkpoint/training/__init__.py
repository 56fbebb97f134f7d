"""Training state: saved in the background, found and loaded again."""
