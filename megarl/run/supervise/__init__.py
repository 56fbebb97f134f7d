"""Processes of an attempt: started, watched, replaced, ended."""
