"""Studies: many runs described by one file, run on the cores at hand, with tables and figures of the results."""
