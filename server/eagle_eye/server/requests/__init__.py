"""What is asked of agents: bundles of evidence, node checks, and what idle nodes show by themselves.

In: incidents and requests of people. Out: requests in the answers to frames, and records of what came of them.
"""
