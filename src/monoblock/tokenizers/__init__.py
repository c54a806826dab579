"""Text to ids and back: train, load, save, sample; built on the `tokenizers` library."""
