"""Parsers of training logs, one module per framework's format."""
