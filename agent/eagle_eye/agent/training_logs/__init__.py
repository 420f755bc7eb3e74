"""Training logs read as they are written, one file for each framework's format."""
