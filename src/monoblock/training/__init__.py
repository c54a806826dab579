"""Training: objectives, optimizers, schedules, the loop, and checkpoints that survive anything."""
