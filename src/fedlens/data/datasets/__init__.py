"""Datasets by name. A factory is called as `factory(root, download, seed, *, <settings>)`."""
