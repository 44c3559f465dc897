"""Local training of several clients as one batched computation."""
