"""Looking inside: what a pass computed, and pictures of it."""
