"""NVIDIA's management library: one connection, guarded against calls that never return."""
