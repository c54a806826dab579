"""Experiments that train models: choices of the architecture and of the training."""
