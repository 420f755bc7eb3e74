"""The operator's terms for nodes: by name, group, NVML name of their GPUs, and for single faults. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.action import ActionKind
from eagle_eye.server.engine.job_names import NAMES_MAX, Names, is_exact, matches

Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
NodeAction = Literal["notify", "drain_node", "restart_job", "exclude_node"]
Members = Annotated[list[str], Meta(min_length=1, max_length=NAMES_MAX)]  # glob patterns of a group's nodes
Groups = Mapping[str, Sequence[str]]  # patterns of each group's nodes

# Higher asks for more.
STRENGTH: MappingProxyType[ActionKind, int] = MappingProxyType(
    {"none": 0, "notify": 1, "checkpoint_now": 2, "drain_node": 3, "restart_job": 4, "exclude_node": 5}
)


class NodeTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Terms for some nodes; a field that is not given is as for all.

    ``nodes`` are glob patterns of names, ``groups`` names of groups or racks, ``gpu_models`` patterns of NVML names of
    GPUs, ``faults`` names of faults; an empty list means all of them. At least one of ``nodes``, ``groups`` and
    ``gpu_models`` must not be empty.
    """

    nodes: Names = []
    groups: Names = []
    gpu_models: Names = []
    faults: Names = []
    action: NodeAction | None = None  # in place of the fault's own
    confidence_min: Ratio | None = None
    drain_after_s: Seconds | None = None
    drain_slowdown_min: Ratio | None = None

    def __post_init__(self) -> None:
        """Refuse terms that can never apply. Raises ValueError, which the configuration reader reports with its key."""
        if not (self.nodes or self.groups or self.gpu_models):
            raise ValueError("names no nodes, groups or gpu_models; what holds for all stands in [policy]")
        if all(getattr(self, term) is None for term in _CAREFUL):
            raise ValueError(f"settles nothing; give one of {', '.join(_CAREFUL)}")
        unknown = [fault for fault in self.faults if fault not in BY_NAME]
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r} in faults; expected one of {', '.join(BY_NAME)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The action and the thresholds for an incident's nodes.

    ``where`` maps a term to the key that sets it, for terms not from ``[policy]`` or the fault itself.
    """

    action: ActionKind
    confidence_min: float
    drain_after_s: float
    drain_slowdown_min: float
    where: Mapping[str, str] = field(default_factory=dict)


# Of equally specific terms the more careful value counts: that with the highest of these.
_CAREFUL: MappingProxyType[str, Callable[[Any], float]] = MappingProxyType(
    {
        "action": lambda action: -STRENGTH[action],
        "confidence_min": lambda floor: floor,
        "drain_after_s": lambda seconds: seconds,
        "drain_slowdown_min": lambda ratio: ratio or math.inf,  # 0: never
    }
)


class _Fitting(NamedTuple):
    key: str
    terms: NodeTerms
    closeness: tuple[int, ...]  # of two that fit, the greater wins


def floors_of(
    given: Iterable[NodeTerms],
    defaults: Floors,
    nodes: Sequence[str],
    fault: str,
    gpu_models: Mapping[str, Sequence[str]],
    groups: Groups,
) -> Floors:
    """Return the floors for a fault on these nodes, with ``gpu_models`` as the names of their GPUs.

    Terms apply if they fit all of the nodes, and all GPUs of each. For each term, those that give the exact node name
    win over those that match it by pattern or group, and these over those that match its GPUs; among these, those that
    also name its GPUs or the fault win. Of the rest the more careful value counts, whatever their order. If a node's
    GPUs are not known, terms for models apply as far as they are more careful than the other terms.
    """
    fitting: list[_Fitting] = []
    unsure: list[_Fitting] = []
    for place, terms in enumerate(given):
        fits = _fits(terms, nodes, fault, gpu_models, groups)
        if fits is not False:
            (fitting if fits else unsure).append(_Fitting(f"policy.nodes[{place}]", terms, _closeness(terms, nodes)))
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    for name, careful in _CAREFUL.items():
        value = getattr(defaults, name)
        said = [(one, given) for one in fitting if (given := getattr(one.terms, name)) is not None]
        if said:
            one, value = max(said, key=lambda pair: (pair[0].closeness, careful(pair[1])))
            where[name] = one.key
        for one in unsure:
            other = getattr(one.terms, name)
            if other is not None and careful(other) > careful(value):
                value, where[name] = other, f"{one.key}, for its GPUs are not known"
        found[name] = value
    return Floors(**found, where=where)


def groups_of(node: str, groups: Groups) -> list[str]:
    """Return the groups that contain a node."""
    return [name for name, members in groups.items() if matches(members, node)]


def _closeness(terms: NodeTerms, nodes: Sequence[str]) -> tuple[int, ...]:
    exact = all(is_exact(terms.nodes, node) for node in nodes)
    return exact, bool(terms.nodes) + bool(terms.groups), bool(terms.gpu_models), bool(terms.faults)


def _fits(
    terms: NodeTerms, nodes: Sequence[str], fault: str, gpu_models: Mapping[str, Sequence[str]], groups: Groups
) -> bool | None:
    """Return whether terms fit all of the nodes; None if that depends on GPUs whose names are not known."""
    if not nodes or (terms.faults and fault not in terms.faults):
        return False
    if not all(matches(terms.nodes, node) for node in nodes):
        return False
    if terms.groups:
        named = {name: groups[name] for name in terms.groups if name in groups}
        if not all(groups_of(node, named) for node in nodes):
            return False
    if not terms.gpu_models:
        return True
    names = [gpu_models.get(node, ()) for node in nodes]
    if not all(matches(terms.gpu_models, name) for own in names for name in own):
        return False
    return True if all(names) else None
