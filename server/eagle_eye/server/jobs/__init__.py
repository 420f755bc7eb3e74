"""What schedulers say of jobs: Slurm and Kubernetes asked about states, nodes and attempts.

In: their answers. Out: records of jobs. Never changes a scheduler's jobs.
"""
