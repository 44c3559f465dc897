"""Tasks: what a model's outputs are compared with, and how that is measured."""
