"""Whole jobs: a recipe becomes tokenizer, data, model and objective, and is run."""
