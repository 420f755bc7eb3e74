"""Kernel messages: which lines report a device or host failure."""
