"""Active checks, requested by the server and run in a child process."""
