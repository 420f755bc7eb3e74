"""Settings for rate limits and TLS."""

from __future__ import annotations

from typing import Literal

import msgspec

from eagle_eye.server.model.bounds import Count, Positive


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rate limits; a burst is what may arrive at once after a pause. Frames are limited by token only."""

    agent_requests_per_s: Positive = 20.0  # per agent token: twice what the fastest agent sends
    agent_burst: Count = 100
    token_requests_per_s: Positive = 50.0  # per other token, except for frames and join tokens
    token_burst: Count = 500
    address_requests_per_s: Positive = 200.0  # per client address, except for frames: a proxy may serve a fleet
    address_burst: Count = 2_000
    remote_write_requests_per_s: Positive = 2_000.0  # per token; Prometheus sends about 2,000 samples per request
    remote_write_burst: Count = 10_000
    # Per client address: malformed requests, and unauthenticated telemetry. Beyond it its connections are closed.
    bad_requests_per_s: Positive = 100.0
    bad_burst: Count = 1_000
    connections: Count = 50_000  # concurrent, within the process's limit on open files
    address_connections: Count = 4_096  # per client address, counting unauthenticated connections only
    head_timeout_s: Positive = 30.0  # for a request's head to arrive, including a new connection's first


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PEM files, reread when they change. ``certificate_file`` "": plain HTTP."""

    certificate_file: str = ""  # the server's certificate chain
    key_file: str = ""  # "": the key is in certificate_file
    client_ca_file: str = ""  # CA of client certificates; "": none are requested
    client_certificates: Literal["agents", "all"] = "agents"  # who must have one; an agent's names its node
