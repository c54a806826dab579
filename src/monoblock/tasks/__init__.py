"""The tasks a model can be trained for, one folder each."""
