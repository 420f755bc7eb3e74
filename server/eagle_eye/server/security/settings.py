"""How often somebody may ask, and which certificates are shown."""

from __future__ import annotations

from typing import Literal

import msgspec

from eagle_eye.server.model.bounds import Count, Positive


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often somebody may ask; a burst is what may come at once after a rest. Frames count by token alone."""

    agent_requests_per_s: Positive = 20.0  # of each agent's token: twice what the fastest agent sends
    agent_burst: Count = 100
    token_requests_per_s: Positive = 50.0  # of each other token, but for frames and join tokens
    token_burst: Count = 500
    address_requests_per_s: Positive = 200.0  # of each client's address, but for frames: a proxy has one for a fleet
    address_burst: Count = 2_000
    remote_write_requests_per_s: Positive = 2_000.0  # of each token; Prometheus sends some 2,000 samples a request
    remote_write_burst: Count = 10_000
    # Of each client's address: what is no request, or telemetry of nobody who is known. Beyond it its connections end.
    bad_requests_per_s: Positive = 100.0
    bad_burst: Count = 1_000
    connections: Count = 50_000  # at a time, as far as the process may open files
    address_connections: Count = 4_096  # of each client's address, of those on which nobody proved who he is
    head_timeout_s: Positive = 30.0  # for a request's head to arrive, and for a new connection's first


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files in PEM, read again when they change. ``certificate_file`` "": plain HTTP."""

    certificate_file: str = ""  # the server's, with its chain
    key_file: str = ""  # "": the key is in certificate_file
    client_ca_file: str = ""  # whose certificates clients show; "": they are asked for none
    client_certificates: Literal["agents", "all"] = "agents"  # who must show one; an agent's names its node
