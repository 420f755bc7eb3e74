"""Accounting of GPU time: attempts, goodput, repair tickets, and nodes that fail repeatedly.

In: records and events. Out: accounts and reports. Requests no actions and excludes no nodes.
"""
