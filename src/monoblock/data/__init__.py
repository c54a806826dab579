"""Read corpora and files, and build batches of token ids; the order is a pure function of (seed, epoch, index)."""
