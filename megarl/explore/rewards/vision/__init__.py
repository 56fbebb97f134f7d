"""Questions about images."""
