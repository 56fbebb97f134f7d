"""The processes of a job, and where the other packages meet."""
