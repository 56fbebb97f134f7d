"""Duties of every process of a job: fork, send heartbeats, end with the parent, hide secrets."""
