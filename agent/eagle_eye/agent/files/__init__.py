"""Bounded, safe reading of files that others write or name."""
