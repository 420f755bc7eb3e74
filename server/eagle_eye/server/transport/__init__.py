"""Connections and raw HTTP below the API: connection limits, client timeouts, and reading bodies.

In: sockets. Out: requests with limits applied. Knows no resource of the API.
"""
