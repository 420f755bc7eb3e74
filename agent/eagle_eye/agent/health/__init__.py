"""What this host's own facts say of it: ``eagle-eye doctor``, the answer to a launcher's health check."""
