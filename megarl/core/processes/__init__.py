"""Processes of this machine: forked, watched, ended with their parent."""
