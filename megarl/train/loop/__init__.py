"""Course of a job on a trainer rank."""
