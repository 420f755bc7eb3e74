"""This node's training processes, their ranks and GPUs, and how they ended."""
