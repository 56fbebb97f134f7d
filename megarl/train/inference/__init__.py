"""Models of a rank, and what they compute about the tokens of a step before it trains on them."""
