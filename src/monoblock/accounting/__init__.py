"""The cost of a model in parameters, FLOPs and bytes, computed from its configuration without building the model."""
