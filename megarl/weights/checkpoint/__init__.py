"""Weights in files: ``formats``, ``training`` state, and the conversions of ``megarl convert``."""
