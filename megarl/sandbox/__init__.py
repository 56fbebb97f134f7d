"""Execution of untrusted programs: in bubblewrap on this machine, or at a remote sandbox service.

Code here imports ``core`` alone. Programs from a policy, a row or a client run only here.
"""

FACE = ("bubblewrap", "client", "interface", "local", "selftest", "service")
"""Modules that other packages may import."""
