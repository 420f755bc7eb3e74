"""The server's own metrics and logs.

In: increments and log records. Out: ``/metrics`` and stderr. Imports nothing of what it measures.
"""
