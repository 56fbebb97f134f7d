"""Ground of all other packages: settings, nouns, errors, metrics, heartbeats."""
