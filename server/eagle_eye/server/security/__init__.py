"""Authentication, sign-in, authorisation, TLS and rate limits.

In: credentials, certificates and what the sign-in provider says. Out: a principal, or a refusal. Holds no secret longer than it takes to hash it.
"""
