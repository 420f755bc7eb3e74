"""Operator commands on the server's files: backup, restore, tokens, integrity, flight recorder dumps.

In: the data folder, or files that a command names. Out: copies, reports, repaired folders. Never touches a running
server's memory.
"""
