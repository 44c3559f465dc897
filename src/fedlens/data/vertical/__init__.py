"""Vertical learning: parties that hold parts of the same examples."""
