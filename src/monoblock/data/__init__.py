"""Named corpora and files in, batches of token ids out; every order is a pure function of (seed, epoch, index)."""
