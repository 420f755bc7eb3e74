"""Active checks, asked for by the server and run in a child process."""
