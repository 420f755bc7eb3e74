"""The files of a site that judging depends on: its topology, its groups of nodes, its learned model.

In: paths from the configuration. Out: checked values. Writes none of them.
"""
