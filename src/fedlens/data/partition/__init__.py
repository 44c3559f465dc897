"""Partitions: which example belongs to which client."""
