"""Where GPU time went: attempts, goodput, repair tickets, nodes that fail again and again.

In: records and events. Out: accounts and reports. Asks for nothing and excludes nobody.
"""
