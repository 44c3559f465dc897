"""Aggregation: how replies become one update, and how the update moves the model."""
