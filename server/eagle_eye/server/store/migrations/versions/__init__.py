"""The versions, oldest first; what one of them did is never changed.

One that only adds tables, and columns that may be left out, says ``keeps_older_servers = True``: servers of the version
before go on with its tables. What they still need goes in a later version.
"""
