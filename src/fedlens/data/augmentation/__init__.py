"""Augmentation: what a step of training sees of an image."""
