"""C++ for the CPU, compiled on the machine it runs on: products with few rows, a whole decoding step, beam search,
and in training GELU and causal attention with their gradients."""
