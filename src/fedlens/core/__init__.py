"""The contracts everything rests on: the seam, trees, seeding, the registry, errors."""
