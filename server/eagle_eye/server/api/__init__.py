"""The HTTP API under ``/api/v1``: one file for each resource, with its charts.

In: requests of people, agents and subscribers. Out: JSON, problem details (RFC 9457), events. Reads and changes records
through the store only; makes no verdicts.
"""
