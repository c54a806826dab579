"""DATA: the training recipes, one TOML file each."""
