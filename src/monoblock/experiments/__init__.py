"""Experiments of `monoblock compare`: each trains several arms (variants) with the same budget, data and seeds."""
