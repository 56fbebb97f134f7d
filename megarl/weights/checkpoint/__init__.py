"""Weights in files: their ``formats``, ``training`` state, and what ``megarl convert`` does."""
