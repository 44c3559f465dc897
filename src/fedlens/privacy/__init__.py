"""Differential privacy: its settings, and the randomness that it needs."""
