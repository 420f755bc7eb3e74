"""Replays recorded traces and written policy cases through the server's engine and policy, without a server.

In: files. Out: verdicts and scores. Touches no running server.
"""
