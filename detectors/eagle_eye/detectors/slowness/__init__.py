"""Detectors of jobs that have become slower, and of the node responsible."""
