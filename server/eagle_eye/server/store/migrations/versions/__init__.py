"""The versions, oldest first; what one of them did is never changed."""
