"""The tasks that a model can be trained for, each in a module of its own."""
