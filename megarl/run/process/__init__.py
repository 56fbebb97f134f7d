"""Processes on this machine: started, forked, watched, ended."""
