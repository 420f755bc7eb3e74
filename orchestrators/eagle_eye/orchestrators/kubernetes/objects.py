"""The fields of Kubernetes objects that are used: nodes, pods, API errors. Pure.

Only the fields below are decoded, so that servers of any version are understood; unknown fields are ignored.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Texts = Mapping[str, str]

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


class ManagedFields(msgspec.Struct, frozen=True, rename={"fields": "fieldsV1"}):
    """Which fields a manager has set: the API server's own record, from Kubernetes 1.18 on."""

    manager: str = ""
    fields: Mapping[str, Any] | None = None


class OwnerReference(msgspec.Struct, frozen=True):
    """An object's owner reference."""

    kind: str = ""
    name: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata common to all objects."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: dt.datetime | None = None
    deletion_timestamp: dt.datetime | None = None
    labels: Texts | None = None
    annotations: Texts | None = None
    owner_references: Sequence[OwnerReference] | None = None
    managed_fields: Sequence[ManagedFields] | None = None


class Taint(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A taint. ``time_added`` is the text written by the API server, kept unchanged."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: str = ""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether pods can be scheduled."""

    unschedulable: bool = False
    taints: Sequence[Taint] | None = None


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One condition of a node or pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeStatus(msgspec.Struct, frozen=True):
    """A node's status."""

    conditions: Sequence[Condition] | None = None


class ClusterNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class ContainerRunning(msgspec.Struct, frozen=True, rename="camel"):
    """A running container."""

    started_at: dt.datetime | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """A container's state; None: not in that state."""

    running: ContainerRunning | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """One container."""

    state: ContainerState = ContainerState()


class Requirements(msgspec.Struct, frozen=True):
    """A container's resources, each a number or text."""

    limits: Mapping[str, Any] | None = None


class Container(msgspec.Struct, frozen=True):
    """A container's specification."""

    resources: Requirements = Requirements()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The pod's node, "" while unscheduled, and its containers."""

    node_name: str = ""
    containers: Sequence[Container] | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's status."""

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
        """Whether the pod has not ended and its deletion was not requested."""
        return self.status.phase not in TERMINAL_PHASES and self.metadata.deletion_timestamp is None

    @property
    def runs(self) -> bool:
        """Whether the pod is live and its containers were started."""
        return self.live and self.status.phase == "Running"


class ListPage(msgspec.Struct, frozen=True):
    """One page of a list; ``metadata.more`` requests the next one."""

    items: Sequence[msgspec.Raw] = ()
    metadata: PageMetadata = msgspec.field(default_factory=lambda: PageMetadata())  # noqa: PLW0108 - it is defined below


class PageMetadata(msgspec.Struct, frozen=True, rename={"more": "continue"}):
    """A list's metadata; ``more`` is "" on the last page."""

    more: str = ""


class Resource(msgspec.Struct, frozen=True):
    """A kind of object, or a subresource, in the API."""

    name: str = ""
    version: str = ""


class Resources(msgspec.Struct, frozen=True):
    """The resources of one API group."""

    resources: Sequence[Resource] = ()


class ErrorCause(msgspec.Struct, frozen=True):
    """One cause of an error."""

    reason: str = ""
    message: str = ""


class ErrorDetails(msgspec.Struct, frozen=True):
    """Details of an error."""

    causes: Sequence[ErrorCause] | None = None


class Status(msgspec.Struct, frozen=True):
    """An API error."""

    message: str = ""
    reason: str = ""
    details: ErrorDetails | None = None

    @property
    def text(self) -> str:
        """Return the message and its causes in one line."""
        causes = [cause.message for cause in (self.details.causes if self.details else None) or () if cause.message]
        return f"{self.message} ({'; '.join(causes)})" if causes else self.message
