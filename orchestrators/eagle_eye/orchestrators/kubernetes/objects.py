"""What is read of Kubernetes' objects: nodes, pods, what its API server says of an error. Pure.

Only the fields below are decoded, so that servers of any version are understood; unknown fields are left alone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Texts = Mapping[str, str]

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


class ManagedFields(msgspec.Struct, frozen=True, rename={"fields": "fieldsV1"}):
    """Which fields somebody has set: the API server's own account of it, from Kubernetes 1.18 on."""

    manager: str = ""
    fields: Mapping[str, Any] | None = None


class Owner(msgspec.Struct, frozen=True):
    """What an object belongs to."""

    kind: str = ""
    name: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """What all objects have."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: dt.datetime | None = None
    deletion_timestamp: dt.datetime | None = None
    labels: Texts | None = None
    annotations: Texts | None = None
    owner_references: Sequence[Owner] | None = None
    managed_fields: Sequence[ManagedFields] | None = None


class Taint(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Why pods are kept away from a node. ``time_added`` is the text that the API server wrote, kept as it is."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: str = ""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether pods may come."""

    unschedulable: bool = False
    taints: Sequence[Taint] | None = None


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One condition of a node or pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeStatus(msgspec.Struct, frozen=True):
    """How the node does."""

    conditions: Sequence[Condition] | None = None


class ClusterNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Running(msgspec.Struct, frozen=True, rename="camel"):
    """A container that runs."""

    started_at: dt.datetime | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """What a container does; None: not that."""

    running: Running | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """One container."""

    state: ContainerState = ContainerState()


class Requirements(msgspec.Struct, frozen=True):
    """What a container may use, a number or a text each."""

    limits: Mapping[str, Any] | None = None


class Container(msgspec.Struct, frozen=True):
    """A container as it is asked for."""

    resources: Requirements = Requirements()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Where the pod runs, "" nowhere yet, and what it is made of."""

    node_name: str = ""
    containers: Sequence[Container] | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How the pod does."""

    phase: str = ""
    conditions: Sequence[Condition] | None = None
    container_statuses: Sequence[ContainerStatus] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def full_name(self) -> str:
        """Return NAMESPACE/NAME."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def live(self) -> bool:
        """Whether the pod has not ended and nobody has asked for its deletion."""
        return self.status.phase not in TERMINAL_PHASES and self.metadata.deletion_timestamp is None

    @property
    def runs(self) -> bool:
        """Whether the pod is live and its containers were started."""
        return self.live and self.status.phase == "Running"


class Page(msgspec.Struct, frozen=True):
    """A part of a list; ``metadata.more`` asks for the next one."""

    items: Sequence[msgspec.Raw] = ()
    metadata: PageMetadata = msgspec.field(default_factory=lambda: PageMetadata())  # noqa: PLW0108 - it is defined below


class PageMetadata(msgspec.Struct, frozen=True, rename={"more": "continue"}):
    """What is said of a list; ``more`` is "" on its last page."""

    more: str = ""


class Resource(msgspec.Struct, frozen=True):
    """A kind of object, or a subresource, that the API server knows."""

    name: str = ""
    version: str = ""


class Resources(msgspec.Struct, frozen=True):
    """What the API server knows in one of its groups."""

    resources: Sequence[Resource] = ()


class ErrorCause(msgspec.Struct, frozen=True):
    """One of the reasons for an error."""

    reason: str = ""
    message: str = ""


class ErrorDetails(msgspec.Struct, frozen=True):
    """More about an error."""

    causes: Sequence[ErrorCause] | None = None


class Status(msgspec.Struct, frozen=True):
    """An error, as the API server says it."""

    message: str = ""
    reason: str = ""
    details: ErrorDetails | None = None

    @property
    def text(self) -> str:
        """Return the message and what it is due to, in one line."""
        causes = [cause.message for cause in (self.details.causes if self.details else None) or () if cause.message]
        return f"{self.message} ({'; '.join(causes)})" if causes else self.message
