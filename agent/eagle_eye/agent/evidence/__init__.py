"""Evidence gathered on this host at the server's request: stacks, logs, dumps. Bounded in time and size."""
