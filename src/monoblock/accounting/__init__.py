"""What a model costs, from its configuration alone: parameters, FLOPs, bytes. No torch, nothing is built."""
