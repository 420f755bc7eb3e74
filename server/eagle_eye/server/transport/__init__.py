"""Connections and raw HTTP below the API: who is accepted, how long a client may take, how bodies are read.

In: sockets. Out: requests with limits applied. Knows no resource of the API.
"""
