"""What is gathered on this host when the server asks: stacks, logs, dumps. Bounded in time and size."""
