"""Execution of untrusted programs: in bubblewrap on this machine, or on a host that offers it as a service.

Code here imports ``core`` alone. Text of a policy, a row or a client runs nowhere else.
"""

FACE = ("box", "bubblewrap", "client", "host", "interface", "local", "name_owners", "proven", "seccomp", "service")
"""Modules that other packages may import."""
