"""Measure the speed and the memory of this machine, beside other installed libraries."""
