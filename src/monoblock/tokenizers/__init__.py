"""Tokenizers, which convert text to ids and back: train, load, save and sample. Built on the `tokenizers` library."""
