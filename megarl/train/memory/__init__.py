"""Moving a rank's models between device, host and disk from phase to phase; detecting growing and exhausted memory."""
