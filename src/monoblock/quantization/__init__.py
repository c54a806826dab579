"""Quantize weights to 8 or 4 bits, and multiply by them without dequantizing the whole matrix."""
