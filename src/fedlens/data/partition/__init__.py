"""Partitions by name. A factory is called as `factory(table, seed, *, <settings>)`; see `fedlens.data.table`."""
