"""What the page draws: a node beside its peers, the course of a job, the lanes of a job's past.

In: the history and the records. Out: arrays and lists that are ready to be drawn. Writes nothing.
"""
