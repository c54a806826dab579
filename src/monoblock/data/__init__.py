"""Read corpora and files, and build batches of token ids in an order that depends only on the seed and the step."""
