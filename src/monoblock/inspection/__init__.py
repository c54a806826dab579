"""Look inside a model: activations of a pass, time and memory by component, and head pruning."""
