"""Frame delivery: the spool on disk, requests, the connection to the server."""
