"""One file for each thing that is observed: GPUs, the host, the fabric, the kernel's log, training processes."""
