"""The settings of an experiment: their source, their schema, their check, and what they name."""
