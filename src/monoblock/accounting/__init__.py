"""The cost of a model computed from its configuration: parameters, FLOPs and bytes, without building it."""
