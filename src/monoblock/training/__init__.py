"""Training: collation, loss, optimizers, schedules, the trainer, and crash-safe checkpoints."""
