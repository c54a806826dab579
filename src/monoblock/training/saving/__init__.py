"""When and by whom checkpoints are written."""
