"""The outermost ASGI application: routes telemetry to its endpoints, serves the page, passes the rest to the API.

In: ASGI events. Out: answers with security headers.
"""
