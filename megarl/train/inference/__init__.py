"""A rank's models, and their forward passes over a step before training."""
