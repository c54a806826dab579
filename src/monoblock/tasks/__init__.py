"""The tasks that a model can be trained for, each in a folder of its own."""
