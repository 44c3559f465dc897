"""Published datasets by name: the table is in `registry.py`, the facts about each in `data/catalogue.toml`."""
