"""The detection loop around the engine: what it is shown, what follows, and whether the server can judge.

In: frames, records, the clock. Out: changes to the store. Sends nothing itself.
"""
