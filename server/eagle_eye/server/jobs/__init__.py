"""Job information from schedulers: queries Slurm and Kubernetes for states, nodes and attempts.

In: their answers. Out: records of jobs. Never changes a scheduler's jobs.
"""
