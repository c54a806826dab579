"""Weights in 8 or 4 bits, and linear layers that read them without dequantizing the whole matrix."""
