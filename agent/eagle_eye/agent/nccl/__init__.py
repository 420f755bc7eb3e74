"""What NCCL and its tools leave: flight-recorder dumps, Inspector lines, RAS replies."""
