"""Policy modes: observe, approve or act, for each job, fault and kind of action. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.engine.job_names import Names, is_exact, matches

Mode = Literal["observe", "approve", "act"]
AskedKind = Literal["exclude_node", "restart_job", "drain_node", "checkpoint_now"]  # kinds that subscribers are asked

# Higher is more careful.
CAREFULNESS = MappingProxyType({mode: len(get_args(Mode)) - place for place, mode in enumerate(get_args(Mode))})


class ModeRule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A mode for some jobs (glob patterns), faults and kinds of action; an empty list means all of them.

    At least one list must not be empty: the mode for all is ``policy.mode``.
    """

    mode: Mode
    jobs: Names = []
    faults: Names = []
    kinds: list[AskedKind] = []

    def __post_init__(self) -> None:
        """Refuse a rule that can never apply. Raises ValueError, which the configuration reader reports by key."""
        if not (self.jobs or self.faults or self.kinds):
            raise ValueError("names no jobs, faults or kinds; the mode for all is policy.mode")
        unknown = [fault for fault in self.faults if fault not in BY_NAME]
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r} in faults; expected one of {', '.join(BY_NAME)}")


class ModeFound(NamedTuple):
    """The applicable mode; ``where`` is the key that sets it."""

    mode: Mode
    where: str


def mode_of(default: Mode, rules: Iterable[ModeRule], job: str, fault: str, kind: str) -> ModeFound:
    """Return the mode for a kind of action because of a fault of a job.

    Of the rules that apply, those win that name the most of job, fault and kind. Among several, one that gives the
    exact job name overrides those that name the same things with a pattern; of the rest the most careful wins, whatever
    their order.
    """
    fitting = [(place, rule) for place, rule in enumerate(rules) if _fits(rule, job, fault, kind)]
    if not fitting:
        return ModeFound(default, "policy.mode")
    most = max(sum(_criteria(rule)) for _, rule in fitting)
    closest = [(place, rule) for place, rule in fitting if sum(_criteria(rule)) == most]
    exact = {_criteria(rule) for _, rule in closest if is_exact(rule.jobs, job)}
    left = [(p, rule) for p, rule in closest if _criteria(rule) not in exact or is_exact(rule.jobs, job)]
    place, rule = max(left, key=lambda one: (CAREFULNESS[one[1].mode], -one[0]))
    return ModeFound(rule.mode, f"policy.modes[{place}].mode")


def _fits(rule: ModeRule, job: str, fault: str, kind: str) -> bool:
    fault_fits = not rule.faults or fault in rule.faults
    return matches(rule.jobs, job) and fault_fits and (not rule.kinds or kind in rule.kinds)


def _criteria(rule: ModeRule) -> tuple[bool, bool, bool]:
    return bool(rule.jobs), bool(rule.faults), bool(rule.kinds)
