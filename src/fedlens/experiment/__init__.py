"""An experiment: its settings, its run directory, its checkpoints and the loop over the rounds."""
