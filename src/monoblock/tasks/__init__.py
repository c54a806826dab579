"""The tasks that a model can be trained for, each in its folder."""
