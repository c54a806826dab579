"""HTTP: OpenAI's API on the decoding engine (extra `[serve]`)."""
