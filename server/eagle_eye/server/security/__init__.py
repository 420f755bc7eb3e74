"""Authentication, sign-in, authorisation, TLS and rate limits.

In: credentials, certificates and what the sign-in provider says. Out: a principal, or a refusal. Of secrets it holds
those that it signs and compares with; tokens only as hashes.
"""
