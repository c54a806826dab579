"""Training recipes: a TOML file for each recipe of the package, and the sections that recipes may have."""
