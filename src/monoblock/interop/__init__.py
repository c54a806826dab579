"""Other formats of models: Hugging Face folders, GGUF files, PEFT adapters, pickled checkpoints."""
