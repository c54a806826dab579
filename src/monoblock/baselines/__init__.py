"""Baselines that a Transformer is compared with: LSTM language models and encoder-decoders, and how they decode."""
