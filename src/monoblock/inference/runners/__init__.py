"""Ways to run a pass of the engine."""
