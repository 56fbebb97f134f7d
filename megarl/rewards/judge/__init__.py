"""A language model as the judge."""
