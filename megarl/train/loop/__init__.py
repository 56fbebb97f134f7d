"""Course of a job in a trainer rank."""
