"""Figures saved as files, drawn with matplotlib (the `plot` extra)."""
