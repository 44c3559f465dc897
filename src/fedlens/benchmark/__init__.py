"""Measuring this machine: how fast rounds are, and where their time goes."""
