"""Detectors of failing hardware: GPUs, links, switches and hosts."""
