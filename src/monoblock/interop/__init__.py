"""Folders and files other programs can read, and ours."""
