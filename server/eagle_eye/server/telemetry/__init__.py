"""What the server counts and logs of itself.

In: increments and log records. Out: ``/metrics`` and stderr. Imports nothing of what it measures.
"""
