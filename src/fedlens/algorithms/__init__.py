"""Algorithms: one file per paper, with what it does at the client and at the server."""
