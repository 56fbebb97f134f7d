"""Models, inference and updates of a step."""
