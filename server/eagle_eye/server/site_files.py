"""The files of a site that judging depends on: its topology, its groups of nodes, its learned model.

In: paths from the configuration. Out: checked values.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from eagle_eye.detectors.signs.learned_features import FEATURES, Metric, View
from eagle_eye.detectors.signs.learned_model import (
    SCORES,
    AutoencoderLayer,
    Covariance,
    Forest,
    LearnedModel,
    ScoreTail,
)
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import did_you_mean
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.engine.settings import PolicySettings

TOPOLOGY_BYTES_MAX = 64 << 20  # some hundred thousand ports
_ShapeT = TypeVar("_ShapeT", bound=msgspec.Struct)


class Places(msgspec.Struct, frozen=True):
    """Where people find a node, which no detector judges by; what is absent is not known."""

    rack_of_node: dict[str, str] = {}
    switch_of_node: dict[str, str] = {}


def read_topology(path: Path) -> Topology:
    """Return the topology. Raises ConfigurationError for a file that is missing, too large or malformed."""
    return _read(path, Topology)


def read_places(path: Path) -> Places:
    """Return what the same file says of places. Raises as ``read_topology``."""
    return _read(path, Places)


def _read(path: Path, shape: type[_ShapeT]) -> _ShapeT:
    try:
        if path.stat().st_size > TOPOLOGY_BYTES_MAX:
            raise ConfigurationError(f"topology_file: {path} is larger than {TOPOLOGY_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except OSError as error:
        raise ConfigurationError(f"topology_file: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'topology_file: {path}: {error}; expected {{"switch_of_node": {{"n1": "leaf1"}}, "switch_of_link": {{}},'
            ' "rack_of_node": {"n1": "r12"}}'
        ) from None


def with_racks(policy: PolicySettings, topology_file: str, where: str = "policy") -> PolicySettings:
    """Return the settings with each rack that their terms of nodes name as a group.

    Raises ConfigurationError, which names the key below ``where``, for a name that is neither a group nor a rack, or
    is both with different nodes; and for a file that cannot be read.
    """
    named = [(name, place) for place, terms in enumerate(policy.nodes) for name in terms.groups]
    racks = _racks(topology_file) if named and topology_file else {}
    groups = dict(policy.node_groups)
    for name, place in named:
        members = groups.setdefault(name, racks.get(name, []))
        if not members:
            rack = "no rack of topology_file" if topology_file else "no topology_file names racks"
            raise ConfigurationError(
                f"{where}.nodes[{place}].groups: expected groups of {where}.node_groups or racks, got {name!r}, which"
                f" is no such group, and {rack}{did_you_mean(name, (*policy.node_groups, *racks))}"
            )
        if name in racks and sorted(members) != racks[name]:
            raise ConfigurationError(
                f"{where}.node_groups.{name}: topology_file has a rack of this name, with other nodes;"
                " give the group another name"
            )
    return msgspec.structs.replace(policy, node_groups=groups)


def _racks(topology_file: str) -> dict[str, list[str]]:
    racks: dict[str, list[str]] = {}
    for node, rack in sorted(read_places(Path(topology_file)).rack_of_node.items()):
        racks.setdefault(rack, []).append(node)
    return racks


# The file of a learned model: one MessagePack document of plain numbers, checked on reading. Nothing in it can run.

MODEL_FORMAT = "eagle-eye-model/1"
MODEL_BYTES_MAX = 64 << 20
MODEL_METRICS_MAX = 256
TREE_DEPTH_MAX = 64
LOOKS_MAX = 10  # more spans than any window holds
MODEL_POLL_S = 60.0  # how often a server looks whether the file changed

_log = logging.getLogger(__name__)


class BadModel(ValueError):
    """A file that is no usable model; the message names the file and what was expected."""


class ModelArray(msgspec.Struct, frozen=True):
    """Numbers in row order, little-endian: float32, float64 or int32."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was made from and how well it did: for people, and for the next training."""

    created_s: float
    job: str = ""
    seed: int = 0
    options: dict[str, Any] = {}
    report: dict[str, Any] = {}


class ModelDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as it is written."""

    format: str
    metrics: list[str]
    grains: list[float]
    span_s: float
    past_s: float
    looks: int
    interval_s: float
    gpus_per_node: list[int]
    power_limits_watts: list[float]
    gpu_models: list[str]
    tails: list[ScoreTail]
    forest_depth: int
    forest_normal: float
    layers: int
    arrays: dict[str, ModelArray]
    node_days: float
    from_s: float
    until_s: float
    metadata: ModelMetadata


class _Format(msgspec.Struct):
    format: str


def read_learned_model(path: Path) -> tuple[LearnedModel, ModelMetadata]:
    """Return the model and where it comes from. Raises BadModel."""
    try:
        if path.stat().st_size > MODEL_BYTES_MAX:
            raise BadModel(f"{path}: larger than {MODEL_BYTES_MAX >> 20} MiB")
        raw = path.read_bytes()
    except OSError as error:
        raise BadModel(f"{path}: {error.strerror or error}") from None
    try:
        written = msgspec.msgpack.decode(raw, type=_Format).format
        if written != MODEL_FORMAT:
            raise BadModel(
                f"{path}: format {written[:40]!r}; this program reads {MODEL_FORMAT!r}: run eagle-eye train again"
            )
        document = msgspec.msgpack.decode(raw, type=ModelDocument)
        return _model(document, hashlib.sha256(raw).hexdigest()), document.metadata
    except (msgspec.DecodeError, ValueError) as error:
        if isinstance(error, BadModel):
            raise
        raise BadModel(f"{path}: {error}") from None


def write_learned_model(path: Path, model: LearnedModel, metadata: ModelMetadata) -> LearnedModel:
    """Put the model into the file, whole or not at all, and return it with its digest. Raises OSError."""
    raw = msgspec.msgpack.encode(_document_of(model, metadata))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return _model(msgspec.msgpack.decode(raw, type=ModelDocument), hashlib.sha256(raw).hexdigest())


class ModelFile:
    """The model file of a running server, read anew when it changed. ``failed`` is called once for each bad file."""

    def __init__(self, path: Path, failed: Callable[[], None]) -> None:
        self._path = path.expanduser()
        self._failed = failed
        self._seen: tuple[float, int, int] | None = None
        self._reported = ""

    def poll(self) -> LearnedModel | BadModel | None:
        """Return the model if the file has changed since the last call, why it is unusable, or None: nothing new.

        May block on the disk.
        """
        try:
            stat = self._path.stat()
            now = (stat.st_mtime, stat.st_size, stat.st_ino)
            if now == self._seen:
                return None
            self._seen = now
            model, metadata = read_learned_model(self._path)
        except OSError as error:
            self._seen = None
            return self._refused(BadModel(f"{self._path}: {error.strerror or error}"))
        except BadModel as error:
            return self._refused(error)
        self._reported = ""
        _log.info("model %s: %.1f node-days, made at %.0f", self._path, model.node_days, metadata.created_s)
        return model

    def _refused(self, error: BadModel) -> BadModel | None:
        if str(error) == self._reported:
            return None
        self._reported = str(error)
        _log.error("the model cannot be used: %s", error)
        self._failed()
        return error


async def keep_model_current(
    file: ModelFile, use: Callable[[LearnedModel | str], None], poll_s: float = MODEL_POLL_S
) -> None:
    """Call ``use`` with the model, and with any that takes its place, until cancelled; a bad one changes nothing.

    Until a first good one ``use`` is told why there is none.
    """
    usable = False
    while True:
        found = await asyncio.to_thread(file.poll)
        if isinstance(found, LearnedModel):
            use(found)
            usable = True
        elif found is not None and not usable:
            use(str(found))
        await asyncio.sleep(poll_s)


def _document_of(model: LearnedModel, metadata: ModelMetadata) -> ModelDocument:
    arrays: dict[str, Any] = {
        "centre": model.centre,
        "scale": model.scale,
        "location": model.covariance.location,
        "precision": model.covariance.precision,
        **{f"forest_{name}": getattr(model.forest, name) for name in _FOREST},
    }
    for place, layer in enumerate(model.layers):
        arrays |= {f"weight{place}": layer.weight, f"bias{place}": layer.bias}
    return ModelDocument(
        format=MODEL_FORMAT,
        metrics=[m.name for m in model.view.metrics],
        grains=[m.grain for m in model.view.metrics],
        span_s=model.view.span_s,
        past_s=model.view.past_s,
        looks=model.looks,
        interval_s=model.interval_s,
        gpus_per_node=list(model.gpus_per_node),
        power_limits_watts=list(model.power_limits_watts),
        gpu_models=list(model.gpu_models),
        tails=list(model.tails),
        forest_depth=model.forest.depth,
        forest_normal=model.forest.normal,
        layers=len(model.layers),
        arrays={name: _packed(np.asarray(array)) for name, array in arrays.items()},
        node_days=model.node_days,
        from_s=model.from_s,
        until_s=model.until_s,
        metadata=metadata,
    )


_FOREST = ("feature", "threshold", "left", "right", "path", "roots")


def _packed(array: Any) -> ModelArray:
    dtype = "int32" if array.dtype.kind == "i" else str(array.dtype)
    return ModelArray(
        dtype, array.shape, np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
    )


def _unpacked(arrays: Mapping[str, ModelArray], name: str, *shape: int | None) -> Any:
    packed = arrays.get(name)
    if packed is None or packed.dtype not in ("float32", "float64", "int32"):
        raise ValueError(f"array {name}: expected float32, float64 or int32 numbers")
    fits = len(packed.shape) == len(shape) and all(w in (None, n) for n, w in zip(packed.shape, shape, strict=True))
    if not fits or math.prod(packed.shape) * np.dtype(packed.dtype).itemsize != len(packed.data):
        raise ValueError(f"array {name}: shape {packed.shape}, expected {shape}")
    array = np.frombuffer(packed.data, np.dtype(packed.dtype).newbyteorder("<")).reshape(packed.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"array {name}: not finite")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _model(document: ModelDocument, digest: str) -> LearnedModel:
    """Return the document's model. Raises ValueError where it makes no sense."""
    unknown = [n for n in document.metrics if n not in catalogue.BY_NAME or catalogue.BY_NAME[n].scope is Scope.LINK]
    if unknown:
        raise ValueError(
            f"metrics {', '.join(unknown)[:120]}: not in this program's catalogue; run eagle-eye train again"
        )
    count = len(document.metrics)
    numbers = (document.span_s, document.past_s, document.interval_s, document.forest_normal, document.node_days)
    sound = (
        0 < count <= MODEL_METRICS_MAX
        and len(document.grains) == count
        and len(document.tails) == len(SCORES)
        and all(0 < n < math.inf for n in (*numbers, *document.grains))
        and all(math.isfinite(v) for tail in document.tails for v in tail)
        and all(tail.scale > 0 and tail.shape >= 0 and tail.peaks_per_node_day > 0 for tail in document.tails)
        and 1 <= document.looks <= LOOKS_MAX
        and 0 < document.forest_depth <= TREE_DEPTH_MAX
    )
    if not sound:
        raise ValueError("a number is out of range: the file was damaged or made by another program")
    wide, arrays = count * len(FEATURES), document.arrays
    scale = _unpacked(arrays, "scale", count, len(FEATURES))
    if not (scale > 0).all():
        raise ValueError("array scale: expected numbers above 0")
    return LearnedModel(
        view=View(
            metrics=tuple(catalogue_metric(n, g) for n, g in zip(document.metrics, document.grains, strict=True)),
            span_s=document.span_s,
            past_s=document.past_s,
        ),
        looks=document.looks,
        interval_s=document.interval_s,
        gpus_per_node=tuple(document.gpus_per_node),
        power_limits_watts=tuple(document.power_limits_watts),
        gpu_models=tuple(document.gpu_models),
        centre=_unpacked(arrays, "centre", count, len(FEATURES)),
        scale=scale,
        layers=_layers(document, wide),
        forest=_forest(document, count),
        covariance=Covariance(
            _unpacked(arrays, "location", 2 * count), _unpacked(arrays, "precision", 2 * count, 2 * count)
        ),
        tails=(document.tails[0], document.tails[1], document.tails[2]),
        node_days=document.node_days,
        from_s=document.from_s,
        until_s=document.until_s,
        digest=digest,
    )


def catalogue_metric(name: str, grain: float) -> Metric:
    """Return a metric of the catalogue as a model looks at it."""
    spec = catalogue.BY_NAME[name]
    return Metric(name, spec.scope is Scope.DEVICE, grain, spec.unit)


def _layers(document: ModelDocument, wide: int) -> tuple[AutoencoderLayer, ...]:
    layers, width = [], wide
    for place in range(document.layers):
        weight = _unpacked(document.arrays, f"weight{place}", None, width)
        layers.append(AutoencoderLayer(weight, _unpacked(document.arrays, f"bias{place}", len(weight))))
        width = len(weight)
    if width != wide or not layers:
        raise ValueError(f"the autoencoder returns {width} numbers, expected {wide}")
    return tuple(layers)


def _forest(document: ModelDocument, count: int) -> Forest:
    size = len(_unpacked(document.arrays, "forest_path", None))
    parts = {name: _unpacked(document.arrays, f"forest_{name}", None if name == "roots" else size) for name in _FOREST}
    for name, limit in (("feature", count), ("left", size), ("right", size), ("roots", size)):
        if parts[name].dtype != np.int32 or not ((parts[name] >= 0) & (parts[name] < limit)).all():
            raise ValueError(f"array forest_{name}: expected indexes below {limit}")
    return Forest(**parts, depth=document.forest_depth, normal=document.forest_normal)
