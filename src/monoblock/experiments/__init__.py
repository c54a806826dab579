"""Comparisons of one command each: the arms of an experiment share their budget, data and seeds."""
