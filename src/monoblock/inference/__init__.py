"""Text generation: settings, filters, beam search, speculative decoding, the engine and its runners."""
