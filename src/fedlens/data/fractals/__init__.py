"""Fractal images: codes of iterated function systems, their rendering, and the datasets made of them."""
