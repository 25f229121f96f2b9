"""The trainer: data, optimizer, checkpoints, logging."""
