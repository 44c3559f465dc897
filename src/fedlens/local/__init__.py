"""Local training: what a client does with the global model and its own data."""
