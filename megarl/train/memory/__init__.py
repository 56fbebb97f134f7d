"""Memory of a rank's models between the phases of a step."""
