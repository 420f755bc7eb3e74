"""The nouns that everything else speaks of: records, errors, times, labels, bounds.

Plain data and pure functions. Imports nothing of the server's other packages.
"""
