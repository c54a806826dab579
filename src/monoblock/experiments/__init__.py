"""Comparisons with one command each: the arms of one are trained with the same budget and the same seeds."""
