"""Durable records in SQLite or PostgreSQL, behind one protocol.

In: changes, each one transaction. Out: records, pages, changed records. Knows no HTTP, and makes no decisions.
"""
