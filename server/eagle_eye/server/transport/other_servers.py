"""What requests from one of our servers to another have in common: their marks, and the client that sends them."""

from __future__ import annotations

import functools
import ssl

import certifi
import httpx

# Of a request that a standby sent on: the leader that it was meant for leads no more, and it goes no further.
FORWARDED = b"eagle-eye-forwarded"
# Of a request that a cell's leader sent on to another cell's, which answers for its own cell alone.
OF_ONE_CELL = b"eagle-eye-of-one-cell"
CONNECT_S = 2.0
ANSWER_S = 60.0


@functools.cache
def _authorities() -> ssl.SSLContext:
    """Return who is trusted; read once, for all clients."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def client(answer_s: float = ANSWER_S) -> httpx.AsyncClient:
    """Return a client for other servers of ours."""
    return httpx.AsyncClient(
        verify=_authorities(),
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
    )
