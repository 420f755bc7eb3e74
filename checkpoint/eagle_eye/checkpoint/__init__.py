"""Checkpoints in the memory of the job's own nodes."""
