"""Files that fedlens writes: atomically, line by line, one owner at a time."""
