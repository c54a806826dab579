"""The command line: one file per verb, which parses arguments, calls the package and prints."""
