"""Recorded traces and written situations through the same engine and policy, without a server.

In: files. Out: verdicts and scores. Touches no running server.
"""
