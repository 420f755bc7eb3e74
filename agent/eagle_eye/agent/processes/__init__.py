"""Who runs here: training processes, their ranks and GPUs, and how they ended."""
