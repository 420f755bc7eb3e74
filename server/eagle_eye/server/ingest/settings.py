"""Settings for ingestion: who may send samples, and how many."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import msgspec
from msgspec import Meta

from eagle_eye.schema.frame import REQUEST_BYTES_MAX
from eagle_eye.server.model import Count, Positive
from eagle_eye.server.model.errors import Refusal


class IngestSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may send frames and how much. ``nodes`` are glob patterns of allowed node names; [] allows any."""

    nodes: list[str] = []
    # Vouched nodes, and as many unvouched ones: bounds memory and labels.
    nodes_max: Count = 20_000
    body_bytes_max: Annotated[int, Meta(ge=1024, le=REQUEST_BYTES_MAX)] = REQUEST_BYTES_MAX
    body_timeout_s: Positive = 30.0  # for a request's body to arrive
    pending_bytes_max: Count = 256 << 20  # frames waiting for the disk, beyond which agents are told to retry
    fresh_s: Positive = 30.0  # the server counts as blind when it heard no agent for this long

    def check_name(self, node: str) -> None:
        """Raise Refusal 403 unless a node of this name may send frames."""
        if self.nodes and not any(fnmatch.fnmatchcase(node, pattern) for pattern in self.nodes):
            raise Refusal(403, "node", f"node {node!r} is in no pattern of ingest.nodes; add it there")


class IdentitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who this site is: ``cluster`` is the label's value of its own nodes, "" for the first one that is seen."""

    cluster: str = ""


class RemoteWriteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Prometheus may send, and which labels name a node, its cluster and its job: the first that a series has."""

    # See model/identity.py: "localhost" and an exporter's pod are passed over, the port is stripped from "instance".
    node_labels: tuple[str, ...] = (
        "eagle_eye_node",
        "k8s_node_name",
        "node",
        "host_name",
        "Hostname",
        "hostname",
        "instance",
    )
    cluster_labels: tuple[str, ...] = ("cluster", "k8s_cluster_name")
    job_labels: tuple[str, ...] = ("eagle_eye_job",)
    body_bytes_max: Annotated[int, Meta(ge=1024, le=64 << 20)] = 8 << 20
    decompressed_bytes_max: Annotated[int, Meta(ge=1024, le=256 << 20)] = 16 << 20
    request_series_max: Count = 20_000  # per request; Prometheus sends 2,000
    series_max: Count = 1_000_000  # known at a time, half a kilobyte each
    token_nodes_max: Annotated[int, Meta(ge=0)] = 4_096  # unvouched nodes that one token may name
