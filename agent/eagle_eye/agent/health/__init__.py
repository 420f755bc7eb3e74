"""Host health from its own facts: ``eagle-eye doctor``, and the answer to a launcher's health check."""
