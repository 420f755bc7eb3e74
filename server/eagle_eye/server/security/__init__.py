"""Authentication, authorisation, TLS and rate limits.

In: credentials and certificates. Out: a principal, or a refusal. Holds no secret longer than it takes to hash it.
"""
