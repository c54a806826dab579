"""Weights as small whole numbers, 8 or 4 bits each, and products that read them where they lie."""
