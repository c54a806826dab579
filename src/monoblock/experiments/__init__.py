"""Experiments of `monoblock compare`: each trains several arms with the same budget, data and seeds."""
