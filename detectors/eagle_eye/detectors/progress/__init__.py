"""Detectors of jobs that stop or make no progress: hangs, crashes, silent nodes."""
