"""Look inside a model: record activations, measure time and memory by component, and prune attention heads."""
