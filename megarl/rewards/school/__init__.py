"""School questions with a short answer."""
