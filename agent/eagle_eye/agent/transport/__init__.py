"""Frames on their way: the spool on disk, requests, the connection to the server."""
