"""The machines of a job, and the placement of its processes on them."""
