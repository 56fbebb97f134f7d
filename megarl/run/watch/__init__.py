"""Live views of runs: pages on loopback, and a view for the terminal. They only read files and the store."""
