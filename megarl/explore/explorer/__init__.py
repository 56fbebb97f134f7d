"""The explorer: it claims, samples, scores and puts back groups."""
