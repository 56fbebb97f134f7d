"""Programs that are judged by running them."""
