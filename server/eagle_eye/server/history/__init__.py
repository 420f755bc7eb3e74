"""Sample storage on disk: a journal of recent frames, segments of older ones, and an optional remote store.

In: frames and rows. Out: replays, queries, recordings. Knows nothing of detectors, incidents or actions.
"""
