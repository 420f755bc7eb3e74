"""Long-term history in a Prometheus-compatible store.

In: segments, and queries. Out: remote write requests, and frames read back.
"""
