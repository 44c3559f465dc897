"""The observers of every run: what it records, writes and shows beside its rounds."""
