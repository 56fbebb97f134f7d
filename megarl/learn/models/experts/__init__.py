"""Expert routers, and the replay of an engine's expert choices."""
