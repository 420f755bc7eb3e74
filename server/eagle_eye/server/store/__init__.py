"""Records that must not be lost, behind one protocol, in SQLite.

In: changes, each one transaction. Out: records, pages, changed records. Knows no HTTP, and decides nothing.
"""
