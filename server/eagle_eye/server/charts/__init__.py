"""Data for the page's charts: a node beside its peers, a job's progress, the lanes of a job's past.

In: the history and the records. Out: arrays and lists ready to draw. Writes nothing.
"""
