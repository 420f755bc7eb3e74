"""The detection loop around the engine: its inputs, its effects, and whether the server can detect faults.

In: frames, records, the clock. Out: changes to the store. Sends nothing itself.
"""
