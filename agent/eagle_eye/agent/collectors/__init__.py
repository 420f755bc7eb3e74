"""Collectors, one module per source: GPUs, the host, the fabric, the kernel log, training processes."""
