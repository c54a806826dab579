"""Draw figures with matplotlib (installed by the `plot` extra) and save them as files."""
