"""Which element of a tensor lies where, and how it gets elsewhere."""
