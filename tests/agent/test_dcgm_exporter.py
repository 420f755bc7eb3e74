from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.collectors import dcgm_exporter
from eagle_eye.agent.collectors.dcgm_exporter import ASK_EVERY_S, SOURCES, DcgmExporterCollector, address
from eagle_eye.agent.exposition import LINE_CHARS_MAX, ParsedSample, samples
from eagle_eye.schema.metrics import BY_NAME, Scope
from tests.agent.fakes import REPOSITORY, FakeClock

LABELS = 'gpu="{gpu}",UUID="GPU-{uuid}",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="n17"'


def line(name: str, value: str, gpu: int = 0, more: str = "") -> str:
    return f"{name}{{{LABELS.format(gpu=gpu, uuid='abcd'[gpu])}{more}}} {value}\n"


PAGE = (
    "# HELP DCGM_FI_PROF_SM_ACTIVE Ratio of cycles.\n# TYPE DCGM_FI_PROF_SM_ACTIVE gauge\n"
    + line("DCGM_FI_PROF_SM_ACTIVE", "0.913")
    + line("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.402", 1)
    + line("DCGM_FI_PROF_PCIE_TX_BYTES", "1.5e+09")
    + line("DCGM_FI_PROF_NVLINK_RX_BYTES", "250000000000", 1, ',pod="train-0",namespace=""')
    + line("DCGM_FI_DEV_FB_USED", "70000")
    + line("DCGM_FI_DEV_SM_CLOCK", "1980")
    + line("DCGM_FI_DEV_GPU_UTIL", "100")
    + line("DCGM_FI_DEV_XID_ERRORS", "0")
)


class Exporter:
    """An HTTP server that gives each connection what it is told to."""

    def __init__(self) -> None:
        self.page = PAGE
        self.head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {size}\r\n\r\n"
        self.talk: Callable[[socket.socket], None] = self._say
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/metrics"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _say(self, end: socket.socket) -> None:
        body = self.page.encode()
        end.sendall(self.head.format(size=len(body)).encode() + body)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                with end, contextlib.suppress(OSError):
                    self.requests.append(end.recv(4096))
                    self.talk(end)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a test has done so
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


class Station:
    def __init__(self, exporter: Exporter, clock: FakeClock) -> None:
        self.clock = clock
        self.drops = Drops()
        self.devices = {"GPU-a": 0, "GPU-b": 3}
        self.collector = DcgmExporterCollector(exporter.url, self.devices, self.drops, clock.monotonic_s)

    def collect(self, after_s: float = ASK_EVERY_S) -> Observed:
        self.clock.advance(after_s)
        return self.collector.collect(self.clock.now_s())


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.close()


@pytest.fixture
def station(exporter: Exporter, clock: FakeClock) -> Station:
    return Station(exporter, clock)


def test_fields_become_metrics_of_the_gpu_that_nvml_names(station: Station) -> None:
    assert station.collect().devices == {
        0: {
            "gpu_sm_active_ratio": 0.913,
            "gpu_pcie_tx_bytes_per_second": 1.5e9,
            "gpu_memory_used_bytes": 70000.0 * 2**20,
            "gpu_sm_clock_hertz": 1.98e9,
            "gpu_utilization_ratio": 1.0,
        },
        3: {"gpu_tensor_active_ratio": 0.402, "gpu_nvlink_rx_bytes_per_second": 2.5e11},
    }
    assert station.drops.snapshot() == {}


def test_the_mapping_stays_within_the_catalogue() -> None:
    for source in SOURCES.values():
        assert BY_NAME[source.metric].scope is Scope.DEVICE
    assert len({source.metric for source in SOURCES.values()}) == len(SOURCES)


def test_the_mapping_is_in_the_docs() -> None:
    text = (REPOSITORY / "docs" / "reference" / "agent.md").read_text(encoding="utf-8")
    for name, source in SOURCES.items():
        assert f"| `{name}` | `{source.metric}` |" in text


def test_the_exporter_is_asked_now_and_then_and_old_values_are_not_repeated(
    station: Station, exporter: Exporter
) -> None:
    assert station.collect().devices
    assert station.collect(1.0) == Observed()
    assert len(exporter.requests) == 1
    assert station.collect().devices
    assert len(exporter.requests) == 2


@pytest.mark.parametrize(
    "value", ["9223372036854775792", "9.223372036854776e+18", "140737488355328", "NaN", "+Inf", "9223372036854775794"]
)
def test_blanks_are_not_observed(station: Station, exporter: Exporter, value: str) -> None:
    exporter.page = line("DCGM_FI_PROF_DRAM_ACTIVE", value) + line("DCGM_FI_DEV_GPU_TEMP", "45")
    assert station.collect().devices == {0: {"gpu_temperature_celsius": 45.0}}
    assert station.drops.snapshot() == {}


def test_what_cannot_be_is_dropped_and_counted(station: Station, exporter: Exporter) -> None:
    exporter.page = (
        line("DCGM_FI_PROF_DRAM_ACTIVE", "1.7")
        + line("DCGM_FI_DEV_POWER_USAGE", "-5")
        + line("DCGM_FI_DEV_GPU_TEMP", "warm")
        + line("DCGM_FI_PROF_SM_ACTIVE", "0.5", 2)
        + line("DCGM_FI_PROF_SM_ACTIVE", "0.5", 0, ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"')
    )
    assert station.collect().devices == {}
    assert station.drops.snapshot() == {
        "dcgm_exporter_range": 2,
        "dcgm_exporter_malformed": 1,
        "dcgm_exporter_unknown_gpu": 1,
        "dcgm_exporter_mig": 1,
    }


def test_without_nvml_s_gpus_it_fails_and_says_so_until_they_are_known(station: Station) -> None:
    station.devices.clear()
    with pytest.raises(CollectFailed, match="NVML has named no GPU"):
        station.collect()
    with pytest.raises(CollectFailed, match="NVML has named no GPU"):
        station.collect(1.0)
    station.devices["GPU-a"] = 0
    assert station.collect().devices.keys() == {0}


@pytest.mark.parametrize(
    ("head", "page", "said"),
    [
        ("HTTP/1.1 503 Down\r\nContent-Length: {size}\r\n\r\n", "busy\n", "it answered 503"),
        ("HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: {size}\r\n\r\n", "x\n", "answered 302"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", PAGE, "was cut off after"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n", PAGE, "IncompleteRead"),
        ("SSH-2.0-OpenSSH_9.2\r\n", "", "SSH-2.0"),
        ("", "", "closed connection without response"),
        ("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n", "up 1\n", "none of the metrics that are read"),
    ],
)
def test_another_answer_fails_with_the_reason(
    station: Station, exporter: Exporter, head: str, page: str, said: str
) -> None:
    exporter.head, exporter.page = head, page
    with pytest.raises(CollectFailed, match=said):
        station.collect()


def test_a_page_that_ends_with_its_connection_is_whole(station: Station, exporter: Exporter) -> None:
    exporter.head = "HTTP/1.0 200 OK\r\n\r\n"
    assert station.collect().devices.keys() == {0, 3}


def test_nobody_there_fails_and_recovers(station: Station, exporter: Exporter) -> None:
    exporter.close()
    with pytest.raises(CollectFailed, match=r"refused"):
        station.collect()


def test_a_page_without_end_is_left(station: Station, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm_exporter, "PAGE_BYTES_MAX", 100_000)

    def pour(end: socket.socket) -> None:
        end.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            end.sendall(b"# comment\n" * 1_000)

    exporter.talk = pour
    with pytest.raises(CollectFailed, match="more than 100000 bytes"):
        station.collect()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nA: "])
def test_a_byte_now_and_then_does_not_prolong_the_deadline(
    station: Station, exporter: Exporter, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(dcgm_exporter, "ANSWER_S", 0.4)

    def drip(end: socket.socket) -> None:
        end.sendall(head)
        while True:
            time.sleep(0.05)
            end.sendall(b"x")

    exporter.talk = drip
    begin_s = time.monotonic()
    with pytest.raises(CollectFailed):
        station.collect()
    assert time.monotonic() - begin_s < 3.0


def test_an_address_is_checked() -> None:
    assert address("http://127.0.0.1:9400/metrics") == ("127.0.0.1", 9400, "/metrics")
    assert address("http://[::1]:9400") == ("::1", 9400, "/metrics")
    for wrong in ("", "9400", "https://h/metrics", "http://", "http://u:p@h/m", "http://h:99999/", "http://h/\r\nX: y"):
        with pytest.raises(ValueError, match=r"expected http|[Pp]ort"):
            address(wrong)


def test_labels_are_read_with_their_escapes() -> None:
    text = 'a{x="1",y="a\\"b\\\\c\\nd" , z=""} 3 1700000000000\na 4\nb{} 5\na{x="1"x="2"} 6\na{x=1} 7\na\n'
    assert list(samples(text, {"a", "b"})) == [
        ParsedSample("a", {"x": "1", "y": 'a"b\\c\nd', "z": ""}, 3.0),
        ParsedSample("a", {}, 4.0),
        ParsedSample("b", {}, 5.0),
        None,
        None,
        None,
    ]


def test_a_line_without_end_is_no_sample() -> None:
    assert list(samples("a" + " " * LINE_CHARS_MAX + "1\n", {"a"})) == [None]
    assert list(samples('a{x="' + "\\" * 10_000, {"a"})) == [None]


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["a", "{", "}", 'x="1"', ",", " ", "\n", "\\", '"', "1"])).map("".join)
)
def test_any_text_is_read(text: str) -> None:
    for sample in samples(text, {"a"}):
        assert sample is None or math.isnan(sample.value) or isinstance(sample.value, float)
