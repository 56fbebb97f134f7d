"""Checks before anything starts, then starts and watches the processes of a job."""
