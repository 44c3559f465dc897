"""Algorithms: one paper, one file, the client half and the server half together."""
