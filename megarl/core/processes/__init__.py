"""Duties of every process of a job: it forks, beats, ends with its parent, and hides secrets."""
