"""Aggregation: how replies are folded into one update, and how the update moves the model."""
