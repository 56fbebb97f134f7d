"""Third-party agents, trained unchanged: an endpoint that records their requests to the rollout model."""
