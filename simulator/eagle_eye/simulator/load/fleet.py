"""The synthetic fleet: names, jobs, ranks, fresh values of every metric, and their encoding for many nodes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import KEYS_MAX, WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import (
    CONTENT_TYPE,
    ID_BYTES,
    ROW_HEAD,
    VERSION,
    encode_row,
    encode_rows_request,
    encode_template,
    template_id,
    template_of,
)

# Each metric of a GPU in training has a level, a variation, and the resolution of its source. Levels are an H100's
# (vendor guides); resolutions are NVML's and DCGM's: whole percent and degrees, clocks in 15 MHz steps, milliwatts,
# KB/s on PCIe, KiB/s on NVLink. Counters and steps are computed with the values.

MIB = float(1 << 20)


class Gauge(NamedTuple):
    """One metric, in its unit. All deviations are standard deviations.

    ``device``: between GPUs, for ever. ``load`` and ``heat``: with the GPU's load and with its lag of half a minute.
    ``noise``: from one reading to the next. Readings are rounded to ``step`` and kept between ``low`` and ``high``.
    """

    name: str
    level: float
    device: float
    load: float
    heat: float
    noise: float
    step: float
    low: float
    high: float


GAUGES: tuple[Gauge, ...] = (
    Gauge("gpu_utilization_ratio", 0.985, 0.002, 0.004, 0.0, 0.012, 0.01, 0.0, 1.0),
    Gauge("gpu_tensor_active_ratio", 0.47, 0.006, 0.012, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_sm_active_ratio", 0.80, 0.008, 0.010, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_dram_active_ratio", 0.39, 0.006, 0.010, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_memory_used_bytes", 66_000 * MIB, 900 * MIB, 0.0, 6 * MIB, 0.0, 2 * MIB, 0.0, 81_559 * MIB),
    Gauge("gpu_power_watts", 655.0, 11.0, 9.0, 0.0, 5.0, 0.001, 60.0, 701.0),
    Gauge("gpu_power_limit_watts", 700.0, 0.0, 0.0, 0.0, 0.0, 1.0, 700.0, 700.0),
    Gauge("gpu_temperature_celsius", 61.0, 2.2, 0.2, 1.1, 0.0, 1.0, 20.0, 90.0),
    Gauge("gpu_memory_temperature_celsius", 73.0, 2.6, 0.1, 1.4, 0.0, 1.0, 20.0, 100.0),
    Gauge("gpu_sm_clock_hertz", 1_755e6, 8e6, -14e6, -4e6, 9e6, 15e6, 345e6, 1_980e6),
    Gauge("gpu_memory_clock_hertz", 2_619e6, 0.0, 0.0, 0.0, 0.0, 1e6, 2_619e6, 2_619e6),
    Gauge("gpu_remap_pending", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    Gauge("gpu_pcie_rx_bytes_per_second", 3.1e9, 3e7, 6e7, 0.0, 9e7, 1e3, 0.0, 6.4e10),
    Gauge("gpu_pcie_tx_bytes_per_second", 2.9e9, 3e7, 6e7, 0.0, 9e7, 1e3, 0.0, 6.4e10),
    Gauge("gpu_pcie_link_width", 16.0, 0.0, 0.0, 0.0, 0.0, 1.0, 16.0, 16.0),
    Gauge("gpu_pcie_link_generation", 5.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0, 5.0),
    Gauge("gpu_nvlink_rx_bytes_per_second", 9.2e10, 8e8, 1.6e9, 0.0, 1.3e9, 1_024.0, 0.0, 4.5e11),
    Gauge("gpu_nvlink_tx_bytes_per_second", 9.2e10, 8e8, 1.6e9, 0.0, 1.3e9, 1_024.0, 0.0, 4.5e11),
    Gauge("gpu_nvlinks_active", 18.0, 0.0, 0.0, 0.0, 0.0, 1.0, 18.0, 18.0),
)
COUNTERS_PER_DAY: dict[str, float] = {  # single events of healthy hardware
    "gpu_ecc_corrected_total": 0.3,
    "gpu_ecc_uncorrected_total": 0.0,
    "gpu_remapped_rows_total": 0.0,
    "gpu_pcie_replays_total": 1.0,
    "gpu_nvlink_errors_total": 0.05,
}


# Values are fresh per node and interval, vectorized over ranges of nodes. Thirty metrics per GPU, in
# float32 where the catalogue allows it, else in float64. A job's state is computed only from the job and the time, so
# that its nodes agree without shared state.

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Integers = NDArray[np.int64]

LOAD_KEPT, HEAT_KEPT = 0.7, 0.965  # of load and heat from one interval to the next, at 1 Hz
SOFTWARE_POWER_BIT = 4.0  # NVML's clocks-event-reasons bit (nvml.h)
CAPPED_W = 680.0
TRAINED = ("train_step_seconds", "train_compute_seconds", "train_loss", "train_grad_norm")
STEP_JITTER = 0.015  # of a step's length
COMPUTE_SHARE = 0.71

_used = {gauge.name for gauge in GAUGES} | set(COUNTERS_PER_DAY) | {"train_step", "gpu_throttle_reasons", *TRAINED}
_names = [name for name in catalogue.names(Scope.DEVICE) if name in _used]
EXACT = tuple(name for name in _names if catalogue.BY_NAME[name].exact)
PLAIN = tuple(name for name in _names if not catalogue.BY_NAME[name].exact)
METRICS = (*EXACT, *PLAIN)


class Readings(NamedTuple):
    """A range of nodes in one interval: ``exact`` (nodes, EXACT, gpus) and ``plain`` (nodes, PLAIN, gpus)."""

    exact: Double
    plain: Single


class FleetValues:
    """What ``nodes`` hosts of ``gpus`` GPUs read, interval by interval. The same seed gives the same values.

    ``jobs`` (nodes,) numbers each node's job. Steps take ``step_s`` and began at ``start_s``, Unix seconds.
    """

    def __init__(
        self, jobs: Integers, gpus: int, interval_s: float, step_s: float, start_s: float, seed: int = 0
    ) -> None:
        nodes = len(jobs)
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._jobs = jobs.astype(np.uint64)
        self._step_s = step_s
        self._start_s = start_s
        shape = (nodes, 1, gpus)
        self._ranks = np.arange(nodes * gpus, dtype=np.uint64).reshape(nodes, gpus)
        self._load = self._rng.standard_normal(shape, dtype=np.float32)
        self._heat = self._rng.standard_normal(shape, dtype=np.float32)
        self._kept = np.float32(LOAD_KEPT**interval_s), np.float32(HEAT_KEPT**interval_s)
        gauges = sorted(GAUGES, key=lambda gauge: PLAIN.index(gauge.name))
        self._places = np.array([PLAIN.index(gauge.name) for gauge in gauges])

        def column(name: str) -> Single:
            return np.array([getattr(gauge, name) for gauge in gauges], dtype=np.float32)[None, :, None]

        self._gain, self._heat_gain, self._noise = column("load"), column("heat"), column("noise")
        step, self._low, self._high = column("step"), column("low"), column("high")
        # Parts of one are divided by whole numbers, as who reads percent does: 98 of 100 is nearer to 0.98 so.
        self._parts = np.rint(1.0 / np.minimum(step, 1.0)).astype(np.float32)
        self._units = np.maximum(step, 1.0)
        spread = self._rng.standard_normal((nodes, len(gauges), gpus), dtype=np.float32)
        self._base: Single = column("level") + column("device") * spread
        self._power = PLAIN.index("gpu_power_watts")
        self._throttle = PLAIN.index("gpu_throttle_reasons")
        self._trained = [PLAIN.index(name) for name in TRAINED]
        self._steps = EXACT.index("train_step")
        self._counters = np.zeros((nodes, len(EXACT), gpus))
        rates = np.array([COUNTERS_PER_DAY.get(name, 0.0) for name in EXACT]) / 86_400.0 * interval_s
        self._rates = rates[None, :, None]
        past = self._rng.poisson(np.where(self._rates > 0.0, 2.0, 0.0), self._counters.shape)
        self._counters += past

    def assign(self, node: int, job: int) -> None:
        """Assign a node to another job from now on."""
        self._jobs[node] = job

    def read(self, first: int, last: int, time_s: float) -> Readings:
        """Return the next readings of nodes ``first`` to before ``last``, of the interval that ended at ``time_s``."""
        here = slice(first, last)
        rng, base = self._rng, self._base[here]
        load, heat = self._load[here], self._heat[here]
        load *= self._kept[0]
        load += np.sqrt(1 - self._kept[0] ** 2) * rng.standard_normal(load.shape, dtype=np.float32)
        heat *= self._kept[1]
        heat += np.sqrt(1 - self._kept[1] ** 2) * load
        gauges = rng.standard_normal(base.shape, dtype=np.float32)
        gauges *= self._noise
        gauges += base
        gauges += load * self._gain
        gauges += heat * self._heat_gain
        gauges *= self._parts
        gauges /= self._units
        np.rint(gauges, out=gauges)
        gauges *= self._units
        gauges /= self._parts
        np.clip(gauges, self._low, self._high, out=gauges)
        plain = np.empty((last - first, len(PLAIN), base.shape[2]), dtype=np.float32)
        plain[:, self._places] = gauges
        plain[:, self._throttle] = np.where(plain[:, self._power] > CAPPED_W, SOFTWARE_POWER_BIT, 0.0)
        exact = self._counters[here]
        exact += rng.random(exact.shape) < self._rates
        done = self._train(here, time_s, plain)
        exact[:, self._steps] = done[:, None]
        return Readings(exact.copy(), plain)

    def _train(self, here: slice, time_s: float, plain: Single) -> Double:
        """Fill in what training says of the last finished step; return its number (nodes,)."""
        jobs, ranks = self._jobs[here], self._ranks[here]
        # Jobs did not begin at the same moment.
        age = (time_s - self._start_s) / self._step_s + 100.0 + _uniform(jobs, 11) * 50.0
        done = np.floor(age)
        steps = done.astype(np.uint64)
        jitter = STEP_JITTER * (_noise(jobs, steps) - _noise(jobs, steps - np.uint64(1)))
        seconds = self._step_s * (1.0 + jitter)[:, None]
        own = _noise(ranks, steps[:, None])
        decay = np.exp(-done / 4_000.0)[:, None]
        columns = (
            np.round(seconds + 2e-4 * own, 6),
            np.round(seconds * COMPUTE_SHARE * (1.0 + 0.004 * own), 6),
            np.round(1.9 + 3.0 * decay + 0.03 * own, 5),
            np.round(0.4 + decay + 0.02 * _noise(jobs, steps + np.uint64(1 << 40))[:, None], 5),
        )
        for place, values in zip(self._trained, columns, strict=True):
            plain[:, place] = values
        return done


def _mixed(one: NDArray[np.uint64], other: Any) -> NDArray[np.uint64]:
    """Return well-mixed bits of two numbers (the finaliser of SplitMix64; wraps around as it should)."""
    with np.errstate(over="ignore"):
        bits = one * np.uint64(0x9E3779B97F4A7C15) + np.uint64(other) * np.uint64(0xD1B54A32D192ED03)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _uniform(one: NDArray[np.uint64], other: Any) -> Double:
    return (_mixed(one, other) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _noise(one: NDArray[np.uint64], other: Any) -> Double:
    """Return noise of mean 0 and deviation 1 that depends on the two numbers alone."""
    bits = _mixed(one, other)
    parts = [((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48)]
    return np.asarray((sum(parts) / 65_535.0 - 2.0) * np.sqrt(3.0))


_ID_AT = 8  # in a row, after version, padding and the tail's size


class RowsWire:
    """One stream's rows, with each template before the first row that needs it."""

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._templates: dict[bytes, bytes] = {}
        self._reported: set[bytes] = set()

    def learn(self, id_: bytes, template: bytes) -> None:
        """Take a template of which rows will come."""
        self._templates[id_] = template

    def body(self, frames: Sequence[bytes], sent_s: float) -> bytes:
        """See wire.Wire."""
        if len(frames) == 1 and frames[0][_ID_AT : _ID_AT + ID_BYTES] in self._reported:
            return encode_rows_request((), frames, sent_s)
        ids = dict.fromkeys(frame[_ID_AT : _ID_AT + ID_BYTES] for frame in frames)
        news = [id_ for id_ in ids if id_ not in self._reported]
        self._reported.update(news)
        return encode_rows_request([self._templates[id_] for id_ in news], frames, sent_s)

    def forget(self) -> None:
        """See wire.Wire."""
        self._reported.clear()

    def telling(self, frame: Frame, sequence: int, time_s: float, events: Sequence[Event]) -> bytes:
        """Return a frame that is sent for events alone, without numbers; ``frame`` says the rest."""
        reported = msgspec.structs.replace(frame, sequence=sequence, time_s=time_s, blocks=[], events=list(events))
        template = template_of(reported)
        raw = encode_template(template)
        id_ = template_id(raw)
        self.learn(id_, raw)
        return encode_row(reported, template, id_)


class FleetRows:
    """Rows of many nodes at once; ``wires`` of the nodes learn their templates."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        """``frames`` are the nodes'; their sequences, times and numbers do not matter."""
        gpus = len(frames[0].blocks[0].keys)
        self.wires = [RowsWire() for _ in frames]
        self._ids = np.zeros(len(frames), dtype=f"V{ID_BYTES}")
        for at, frame in enumerate(frames):
            self.change(at, frame)
        self._row = np.dtype(
            [
                ("version", "u1"),
                ("padding", "V3"),
                ("tail", "<u4"),
                ("id", f"V{ID_BYTES}"),
                ("sequence", "<u8"),
                ("time_s", "<f8"),
                ("exact", "<f8", (len(EXACT), gpus)),
                ("plain", "<f4", (len(PLAIN), gpus)),
            ]
        )
        if self._row.fields is None or self._row.fields["exact"][1] != ROW_HEAD.size:
            raise RuntimeError("the layout of rows is not what the schema says")

    def change(self, at: int, frame: Frame) -> None:
        """Make the rows of a node from now on those of another frame, of the same blocks."""
        raw = encode_template(template_of(frame))
        id_ = template_id(raw)
        self.wires[at].learn(id_, raw)
        self._ids[at] = np.void(id_)

    def renew(self, at: int, frame: Frame) -> None:
        """Begin another stream in a node's place: the server knows none of its templates."""
        self.wires[at] = RowsWire()
        self.change(at, frame)

    def encode(self, first: int, sequence: int | Integers, time_s: float, readings: Readings) -> list[bytes]:
        """Return the rows of the nodes from ``first`` on whose readings these are; ``sequence``: one, or (nodes,)."""
        count = len(readings.exact)
        rows = np.zeros(count, dtype=self._row)
        rows["version"] = VERSION
        rows["id"] = self._ids[first : first + count]
        rows["sequence"] = sequence
        rows["time_s"] = time_s
        rows["exact"] = readings.exact
        rows["plain"] = readings.plain
        data, size = rows.tobytes(), self._row.itemsize
        return [data[at : at + size] for at in range(0, len(data), size)]


NODES_MAX = 100_000
AGENT_VERSION = "loadtest"


@dataclass(frozen=True)
class Load:
    """The requested load. ``job_nodes``: hosts per job, the last one smaller. Times in seconds.

    ``spread`` is the share of the interval over which the nodes send, in turn: 0 all at once, 1 evenly.
    Acknowledgements of frames that are due after ``warm_up_s`` are counted apart as well.
    """

    nodes: int
    gpus: int = 8
    interval_s: float = 1.0
    duration_s: float = 60.0
    job_nodes: int = 128
    step_s: float = 2.0
    spread: float = 1.0
    prefix: str = "load"
    seed: int = 0
    warm_up_s: float = 0.0

    def check(self) -> None:
        """Check that it is possible. Raises ConfigurationError."""
        limits = {
            "--nodes": (self.nodes, 1, NODES_MAX),
            "--gpus": (self.gpus, 1, KEYS_MAX),
            "--interval": (self.interval_s, 0.1, 3_600.0),
            "--duration": (self.duration_s, self.interval_s, 30 * 86_400.0),
            "--job-nodes": (self.job_nodes, 1, NODES_MAX),
            "--step-seconds": (self.step_s, 0.01, 3_600.0),
            "--spread": (self.spread, 0.0, 1.0),
            "--warm-up": (self.warm_up_s, 0.0, self.duration_s),
        }
        for flag, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ConfigurationError(f"{flag}: expected {least:g} to {most:g}, got {value:g}")
        if not (0 < len(self.prefix) <= 200 and self.prefix.isprintable()):
            raise ConfigurationError(f"--prefix: expected 1 to 200 printable characters, got {self.prefix[:80]!r}")

    @property
    def intervals(self) -> int:
        """How many frames each node makes."""
        return max(round(self.duration_s / self.interval_s), 1)


class SimulatedFleet:
    """The nodes in sending order; a job's nodes are scattered in it, as at a real site."""

    def __init__(self, load: Load, stream: str) -> None:
        """``stream`` distinguishes this run's frames from those of every other."""
        places = np.random.default_rng([load.seed, 1]).permutation(load.nodes)
        self.jobs: Integers = places // load.job_nodes
        sizes = Counter(self.jobs.tolist())
        self.names = [f"{load.prefix}-{number:05d}" for number in range(1, load.nodes + 1)]
        self.frames: list[Frame] = []
        for name, place, number in zip(self.names, places.tolist(), self.jobs.tolist(), strict=True):
            job = f"{load.prefix}-job-{number:03d}"
            first = place % load.job_nodes * load.gpus
            world = sizes[number] * load.gpus
            ranks = [Rank(job, first + device, world, device) for device in range(load.gpus)]
            self.frames.append(_frame(name, stream, job, ranks, load))


def _frame(node: str, stream: str, job: str, ranks: list[Rank], load: Load) -> Frame:
    """Return what a node's frames have in common: all but sequence, time and numbers."""
    return Frame(
        version=WIRE_VERSION,
        node=node,
        boot_id=stream,
        stream=stream,
        sequence=1,
        time_s=1.0,
        interval_s=load.interval_s,
        agent_version=AGENT_VERSION,
        job=job,
        ranks=ranks,
        blocks=[Block(Scope.DEVICE, list(range(load.gpus)), list(METRICS), b"")],
        collectors={"loadtest": "ok"},
    )
