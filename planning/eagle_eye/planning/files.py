"""The files that ``eagle-eye plan`` reads: a profile, with the cost of a job's layers, and a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec

from eagle_eye.planning.plan import Plan, check_plan
from eagle_eye.schema.configuration import ConfigurationError

PROFILE_BYTES_MAX = 16 << 20
LAYERS_MAX = 1_000
PROFILE_FORMAT: Literal["eagle-eye-profile/1"] = "eagle-eye-profile/1"
LAYER_SECONDS_MAX = 86_400.0  # per layer and micro-batch
LAYER_BYTES_MAX = 1 << 50


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layer and one micro-batch: ``layer`` counts from 0, in the order in which data passes.

    ``optimizer_bytes`` are its states, without gradients: these are assumed to be as large as the parameters.
    ``activation_bytes`` are what is kept from the forward to the backward pass.
    """

    layer: int
    forward_s: float
    backward_s: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    name: str = ""

    @property
    def state_bytes(self) -> int:
        """What another node needs to take over the layer."""
        return self.parameter_bytes + self.optimizer_bytes


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layers of a job, in order; ``micro_batch`` is the number of samples that they were measured with."""

    format: Literal["eagle-eye-profile/1"]
    micro_batch: int
    layers: tuple[Layer, ...]
    device: str = ""  # the device measured on


class Sums(msgspec.Struct, frozen=True):
    """The total cost of the first i layers, for each i from 0 to their number: differences are stages."""

    forward_s: list[float]
    backward_s: list[float]
    held_bytes: list[int]  # parameters, gradients and optimizer states
    state_bytes: list[int]
    activation_bytes: list[int]


def sums(profile: Profile) -> Sums:
    """Return the layers' sums."""
    layers = profile.layers
    return Sums(
        [*accumulate((layer.forward_s for layer in layers), initial=0.0)],
        [*accumulate((layer.backward_s for layer in layers), initial=0.0)],
        [*accumulate((layer.state_bytes + layer.parameter_bytes for layer in layers), initial=0)],
        [*accumulate((layer.state_bytes for layer in layers), initial=0)],
        [*accumulate((layer.activation_bytes for layer in layers), initial=0)],
    )


def read_profile(path: Path) -> Profile:
    """Return the file's profile. Raises ConfigurationError, which names what is wrong or missing."""
    raw = read_bounded(path, "--profile", PROFILE_BYTES_MAX)
    try:
        profile = msgspec.json.decode(raw, type=Profile)
        check(profile)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(f"--profile: {path}: {error}") from None
    return profile


def check(profile: Profile) -> None:
    """Check that the profile can be used for planning. Raises ValueError."""
    if not 1 <= len(profile.layers) <= LAYERS_MAX:
        raise ValueError(f"layers: expected 1 to {LAYERS_MAX}, got {len(profile.layers)}")
    if not 1 <= profile.micro_batch <= 1_000_000:
        raise ValueError(f"micro_batch: expected 1 to 1000000 samples, got {profile.micro_batch}")
    _check_order([layer.layer for layer in profile.layers])
    for layer in profile.layers:
        for name in ("forward_s", "backward_s"):
            if not 0 <= (seconds := getattr(layer, name)) <= LAYER_SECONDS_MAX:
                raise ValueError(
                    f"layers[{layer.layer}].{name}: expected 0 to {LAYER_SECONDS_MAX:g} s, got {seconds:g}"
                )
        for name in ("parameter_bytes", "optimizer_bytes", "activation_bytes"):
            if not 0 <= (size := getattr(layer, name)) <= LAYER_BYTES_MAX:
                raise ValueError(f"layers[{layer.layer}].{name}: expected 0 to {LAYER_BYTES_MAX} bytes, got {size}")
    if math.fsum(layer.forward_s + layer.backward_s for layer in profile.layers) <= 0:
        raise ValueError("layers: none of them takes any time; measure again")


def _check_order(numbers: Sequence[int]) -> None:
    """Check that each layer is there, once and in order. Raises ValueError."""
    missing = sorted({*range(min(max(numbers), LAYERS_MAX))} - {*numbers})
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(f"layers: missing {', '.join(map(str, missing[:8]))}{more}; each from 0 on is needed")
    for place, number in enumerate(numbers):
        if number != place:
            raise ValueError(f"layers[{place}].layer: expected {place}, got {number}; each once, in order")


def read_bounded(path: Path, option: str, bytes_max: int) -> bytes:
    """Return the file's bytes. Raises ConfigurationError if unreadable or too large."""
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{option}: {path}: {reason}") from None
    if len(raw) > bytes_max:
        raise ConfigurationError(f"{option}: {path} is larger than {bytes_max} bytes; is it another file?")
    return raw


PLAN_BYTES_MAX = 256 << 20


def read_plan(path: Path, option: str = "--plan") -> Plan:
    """Return the plan in the file that the option names. Raises ConfigurationError for an invalid one."""
    raw = read_bounded(path, option, PLAN_BYTES_MAX)
    try:
        plan = msgspec.json.decode(raw, type=Plan)
        check_plan(plan)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(f"{option}: {path}: {error}; eagle-eye plan --json writes plans") from None
    return plan


def check_hardware(plan: Plan, gpus_per_node: int | None, gpu_memory_bytes: int | None) -> None:
    """Check that the plan is for nodes like these; None: unknown. Raises ConfigurationError."""
    wanted = plan.hardware
    gpus = wanted.gpus_per_node if gpus_per_node is None else gpus_per_node
    memory_bytes = wanted.gpu_memory_bytes if gpu_memory_bytes is None else gpu_memory_bytes
    if gpus != wanted.gpus_per_node or memory_bytes < wanted.gpu_memory_bytes:
        raise ConfigurationError(
            f"--plan: it is for other hardware: GPUs of a node {wanted.gpus_per_node}, not {gpus}; bytes of a GPU"
            f" {wanted.gpu_memory_bytes}, not {memory_bytes}; plan again"
        )
