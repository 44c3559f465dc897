"""A run: its directory, its checkpoints, and the loop over the rounds."""
