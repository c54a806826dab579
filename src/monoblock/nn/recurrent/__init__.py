"""LSTM language models and encoder-decoders, with the dropout of LSTM language models."""
