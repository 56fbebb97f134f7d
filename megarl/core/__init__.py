"""What every other package may use: settings, nouns, errors, metrics, heartbeats."""
