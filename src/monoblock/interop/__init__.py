"""Read and write models: monoblock and Hugging Face folders, GGUF files, PEFT adapters; read pickled checkpoints."""
