"""Experiments that measure time and memory, mostly of models that are not trained."""
