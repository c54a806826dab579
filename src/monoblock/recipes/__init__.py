"""Training recipes: one TOML file each, their schema and their parser."""
