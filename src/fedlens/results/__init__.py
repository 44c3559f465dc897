"""Results of runs: rows, values, tables and figures, from the folders of runs and studies."""
