"""Parsers and clients for NCCL and its tools: flight-recorder dumps, Inspector lines, RAS replies."""
