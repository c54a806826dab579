"""Weights as small whole numbers, 8 or 4 bits each, and the kernels that multiply by them where they lie."""
