"""Jobs that are slower than they were, and the node that makes them so."""
