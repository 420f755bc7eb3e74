"""Who may do what: tokens, TLS, rate limits.

In: credentials and certificates. Out: a principal, or a refusal. Holds no secret longer than it takes to hash it.
"""
