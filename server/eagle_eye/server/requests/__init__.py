"""Requests to agents (evidence bundles, node checks), and faults found on idle nodes.

In: incidents and people's requests. Out: requests in the answers to frames, and records of their results.
"""
