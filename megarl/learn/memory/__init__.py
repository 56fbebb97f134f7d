"""Memory of a job's models in bytes, and its place in each phase of a step."""
