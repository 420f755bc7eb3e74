"""The outermost ASGI application: telemetry to its endpoints, the page's files, all else to the API.

In: ASGI events. Out: answers with security headers.
"""
