"""Engines: they answer asks, and know no algorithm."""
