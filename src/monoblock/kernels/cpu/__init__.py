"""C++ kernels for the CPU, compiled on the machine they run on: matrix products with few rows, complete decoding steps,
beam search, and, for training, GELU and causal attention with their gradients."""
