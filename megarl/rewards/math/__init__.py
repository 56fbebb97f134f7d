"""Mathematics with a final answer."""
