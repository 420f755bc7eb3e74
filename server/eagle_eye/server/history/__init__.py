"""Samples on disk: the journal of what was just received, segments of what went before, and a remote store.

In: frames and rows. Out: replays, queries, recordings. Knows nothing of detectors, incidents or actions.
"""
