"""Analyses of runs: what their recorded models show."""
