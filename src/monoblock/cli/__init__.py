"""The command line: one small file a verb, which parses, calls and prints."""
