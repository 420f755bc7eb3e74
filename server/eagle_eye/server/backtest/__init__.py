"""Replays recorded traces and written policy cases through the server's engine and policy, without a server.

In: files, or a Prometheus whose samples become a trace. Out: verdicts and scores, traces. Touches no running server.
"""
