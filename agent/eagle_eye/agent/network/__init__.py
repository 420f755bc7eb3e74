"""The node's network ports and the names of its links."""
