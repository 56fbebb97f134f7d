"""Execution of untrusted programs: in bubblewrap on this machine, or at a remote sandbox service.

Code here imports ``core`` alone. Programs from a policy, a row or a client run only here.
"""

FACE = ("box", "bubblewrap", "client", "host", "interface", "local", "name_owners", "proven", "seccomp", "service")
"""Modules that other packages may import."""
