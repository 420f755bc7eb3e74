"""The basic types of the server: records, errors, times, labels, bounds.

Plain data and pure functions. Imports none of the server's other packages.
"""
