"""Training recipes: a TOML file for each recipe of the package, and the code that parses and checks recipes."""
