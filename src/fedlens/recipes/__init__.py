"""Ready experiments, one TOML file each, grouped by paper: `fedlens list recipes`.

The first line of a recipe, a comment, says in one line what it is; the comments below say which section of the
paper its settings come from, and what is assumed.
"""
