"""Checkpoints: folders, verified tensor files, saving a running job, resuming it."""
